"""Settings of the storage path as they are now. One file per kind of setting; nothing is written.

A kind lists the knobs it knows, with what a person must know before changing one, and reads their
values on the subjects of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvprobe import registry
from kvprobe.knobs._subjects import Subjects, of_device, of_host, of_path

__all__ = [
    "Family",
    "Knob",
    "KnobKind",
    "Reach",
    "Setting",
    "Subjects",
    "as_row",
    "kinds",
    "of_device",
    "of_host",
    "of_path",
    "read_all",
    "setting",
]


class Family(StrEnum):
    """What a knob is about; the tuner files have the same names."""

    BLOCK_SIZE = "block_size"
    QUEUE_DEPTH = "queue_depth"
    PREFETCH = "prefetch"


class Reach(StrEnum):
    """What it takes until a changed value is in force."""

    LIVE = "live"
    NEW_OPENS = "new_opens"
    """Files opened from then on; what is open keeps the old value."""
    RECONNECT = "reconnect"
    """The controller must be disconnected and connected again."""
    REMOUNT = "remount"
    MODULE_RELOAD = "module_reload"
    ENGINE_RESTART = "engine_restart"
    READ_ONLY = "read_only"
    DESTRUCTIVE = "destructive"
    """Only by making the namespace, volume or file system anew: data is lost."""


@dataclass(frozen=True)
class Knob:
    """One entry of the catalogue.

    ``unit`` is that of the value. ``ignored`` says, as a clause, what takes no notice of
    a write although it succeeds, or what undoes it later. Empty text: nothing to say, or not known.
    """

    name: str
    family: Family
    unit: str
    meaning: str
    reach: Reach
    default: str = ""
    allowed: str = ""
    ignored: str = ""
    risk: str = ""
    undo: str = "write back the value that was read"


@dataclass(frozen=True)
class Setting:
    """The value of a knob on one subject. None: it is there but cannot be read.

    ``source`` is the file that was read. ``reach`` and ``allowed`` are the catalogue's or what
    holds on this subject; ``note`` is what to know of it here.
    """

    knob: Knob
    subject: str
    value: str | None
    source: str
    reach: Reach
    allowed: str
    note: str = ""


@dataclass(frozen=True)
class KnobKind:
    """One kind of setting, exported as ``KIND`` by its file.

    ``read`` yields what is there on the given subjects and never raises for what is not.
    """

    name: str
    summary: str
    knobs: tuple[Knob, ...]
    read: Callable[[Subjects], Iterable[Setting]]


def kinds() -> dict[str, KnobKind]:
    """Every kind by file name.

    Raises:
        KvprobeError: a file of this package exports no ``KIND``.
    """
    return registry.load(__name__, "KIND", KnobKind)


def setting(
    knob: Knob,
    subject: str,
    value: str | None,
    source: object,
    note: str = "",
    reach: Reach | None = None,
    allowed: str = "",
) -> Setting:
    """A setting with the catalogue's words where nothing else is said."""
    return Setting(
        knob, subject, value, str(source), reach or knob.reach, allowed or knob.allowed, note
    )


def read_all(subjects: Subjects, family: Family | None = None) -> list[Setting]:
    """Every setting of the subjects, by family, then subject, then name.

    Raises:
        KvprobeError: see ``kinds``.
    """
    found = [each for kind in kinds().values() for each in kind.read(subjects)]
    order = list(Family)
    found.sort(key=lambda s: (order.index(s.knob.family), s.subject, s.knob.name, s.value or ""))
    return [each for each in found if family is None or each.knob.family is family]


def as_row(each: Setting) -> dict[str, str | None]:
    """A row of the table ``knobs``."""
    return {
        "name": each.knob.name,
        "family": each.knob.family.value,
        "subject": each.subject,
        "value": each.value,
        "unit": each.knob.unit,
        "source": each.source,
        "reachability": each.reach.value,
        "note": each.note,
    }
