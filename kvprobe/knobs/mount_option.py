"""Options of a mounted file system, as ``/proc/self/mountinfo`` shows them."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting

_NFS = ("nfs", "nfs4")
_REMOUNT = "mount again with the options of before"
UNSET = "not set"
"""As a value: the file system has its own way, see the default."""


def _knob(
    name: str,
    family: Family,
    unit: str,
    meaning: str,
    reach: Reach = Reach.REMOUNT,
    default: str = "",
    allowed: str = "",
    risk: str = "",
    ignored: str = "",
) -> Knob:
    return Knob(name, family, unit, meaning, reach, default, allowed, ignored, risk, _REMOUNT)


_OF: dict[tuple[str, ...], tuple[Knob, ...]] = {
    ("ext4",): (
        _knob(
            "stripe",
            Family.BLOCK_SIZE,
            "blocks",
            "files are laid out and written in multiples of this",
            default="as made by mkfs, 0 without",
            risk="one that is not that of the RAID below makes writes slower",
        ),
    ),
    ("xfs",): (
        _knob(
            "sunit",
            Family.BLOCK_SIZE,
            "512 B",
            "stripe unit: files are aligned to it",
            default="as made by mkfs",
        ),
        _knob(
            "swidth",
            Family.BLOCK_SIZE,
            "512 B",
            "stripe width",
            default="as made by mkfs",
        ),
        _knob(
            "allocsize",
            Family.BLOCK_SIZE,
            "",
            "how far beyond the end a growing file gets room, so that it lies in one piece",
            default="grows with the file up to 8 GiB",
            allowed="a power of two from 4k to 1g",
        ),
    ),
    _NFS: (
        _knob(
            "rsize",
            Family.BLOCK_SIZE,
            "B",
            "the largest read that is sent",
            default="what the server offers, at most 1048576",
            allowed="1024 .. 1048576",
        ),
        _knob(
            "wsize",
            Family.BLOCK_SIZE,
            "B",
            "the largest write that is sent",
            default="what the server offers, at most 1048576",
            allowed="1024 .. 1048576",
        ),
        _knob(
            "nconnect",
            Family.QUEUE_DEPTH,
            "connections",
            "connections to the server",
            default="1",
            allowed="1 .. 16",
            ignored="a remount, and a second mount of the same server, take no notice: unmount all",
        ),
    ),
}


def _read(subjects: Subjects) -> Iterator[Setting]:
    source = subjects.roots.mountinfo
    seen: set[int] = set()
    for mount in subjects.mounts:
        if mount.device in seen:
            continue  # the same file system again: a bind mount
        seen.add(mount.device)
        given = dict(_parts(mount.options))
        for knob in _knobs_of(mount.filesystem):
            value = given.get(knob.name, UNSET)
            yield setting(knob, mount.point, value, source, mount.filesystem)


def _knobs_of(filesystem: str) -> tuple[Knob, ...]:
    return next((knobs for names, knobs in _OF.items() if filesystem in names), ())


def _parts(options: str) -> Iterator[tuple[str, str]]:
    for option in options.split(","):
        name, _, value = option.partition("=")
        yield name, value if value.isprintable() else UNSET


KIND = KnobKind(
    "mount_option",
    "options of a mounted file system",
    tuple(knob for knobs in _OF.values() for knob in knobs),
    _read,
)
