"""The probes of the content folder: what ``NAME.toml`` says about ``NAME.bpf.c``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe import content, schema
from kvprobe.errors import KvprobeError

_KEYS = {"summary", "table", "ring_bytes", "optional", "hides", "notes", "needs", "instead", "uses"}
_KEYS |= {"library"}


@dataclass(frozen=True)
class Probe:
    """One probe.

    ``hides`` says, per event, kernel function or kernel module, what is not seen where a machine
    lacks it. Events in ``optional`` may be absent without a word: old names, other architectures.
    Where the kernel module ``needs`` is absent, the probe has nothing to see and is left out.
    ``instead`` names, per event or function, the one that does its work where it is missing, and
    that is not used where it is there. A probe works only beside those it ``uses``. The functions
    of its ``LIBRARY_`` hooks are those of the shared library ``library``, any version of it; where
    there is none, the probe is left out as well.
    """

    name: str
    summary: str
    table: str
    ring_bytes: int
    source: Path
    hides: dict[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    needs: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    library: str = ""


def available() -> dict[str, Probe]:
    """Every probe by name, in order of names.

    Raises:
        KvprobeError: a description is malformed, or lacks its source.
    """
    sources = content.files("probes", ".bpf.c")
    found = {}
    for name, path in content.files("probes", ".toml").items():
        if name not in sources:
            raise KvprobeError(f"probe {path} has no {name}.bpf.c beside it")
        found[name] = _read(name, path, sources[name])
    return found


def choose(names: Sequence[str] | None) -> tuple[Probe, ...]:
    """The probes of these names and those that they use; all of them for None.

    Raises:
        KvprobeError: there is no probe of that name.
    """
    probes = available()
    for name in names or ():
        if name not in probes:
            raise KvprobeError(f"no probe {name!r}", f"there are: {', '.join(probes)}")
    used = {other for name in names or () for other in probes[name].uses}
    return tuple(
        probe
        for probe in probes.values()
        if names is None or probe.name in names or probe.name in used
    )


def _read(name: str, path: Path, source: Path) -> Probe:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvprobeError(f"cannot read {path}: {error}") from error
    unknown = data.keys() - _KEYS
    if unknown:
        raise KvprobeError(f"{path}: unknown key {min(unknown)}", f"known: {sorted(_KEYS)}")
    table = data.get("table")
    if table not in schema.TABLES or not schema.TABLES[table].kernel:
        raise KvprobeError(f"{path}: table must name a kernel table of the schema, not {table!r}")
    ring_bytes = data.get("ring_bytes")
    if not isinstance(ring_bytes, int) or not is_ring_size(ring_bytes):
        raise KvprobeError(f"{path}: ring_bytes must be a power of two of at least 4096")
    return Probe(
        name,
        str(data.get("summary", "")),
        table,
        ring_bytes,
        source,
        _texts(data.get("hides", {})),
        tuple(data.get("optional", ())),
        tuple(data.get("notes", ())),
        str(data.get("needs", "")),
        _texts(data.get("instead", {})),
        tuple(data.get("uses", ())),
        str(data.get("library", "")),
    )


def _texts(table: dict[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in table.items()}


def is_ring_size(size: int) -> bool:
    """Whether the kernel takes a ring buffer of so many bytes: a power of two of whole pages."""
    return size >= 4096 and size & (size - 1) == 0
