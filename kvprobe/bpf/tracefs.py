"""Reading tracefs where it is mounted, and where it is not.

Containers and small systems often do not mount tracefs. Mounting it where everybody sees it would
change the machine; instead kvprobe makes a detached mount (``fsopen``/``fsmount``, kernel 5.2+)
that only its own file descriptor can reach and that disappears with the process.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

MOUNTED = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))

# System call numbers above 423 are the same on every architecture.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSCONFIG_CMD_CREATE = 6
_CLOEXEC = 1


def mounted() -> Path | None:
    """Where tracefs is mounted and readable, or None."""
    return next((place for place in MOUNTED if os.access(place / "events", os.R_OK)), None)


@lru_cache(maxsize=1)
def root() -> Path | None:
    """A folder to read tracefs in: the mounted one or a private one; None without the right."""
    place = mounted()
    if place is not None:
        return place
    descriptor = detached_mount("tracefs")
    return None if descriptor is None else Path(f"/proc/self/fd/{descriptor}")


def detached_mount(filesystem: str) -> int | None:
    """Mount a pseudo file system that no path reaches.

    Returns:
        A directory descriptor that the caller owns, or None where the kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    context = int(library.syscall(ctypes.c_long(_FSOPEN), filesystem.encode(), _CLOEXEC))
    if context < 0:
        return None
    try:
        made = library.syscall(
            ctypes.c_long(_FSCONFIG), context, _FSCONFIG_CMD_CREATE, None, None, 0
        )
        if made < 0:
            return None
        descriptor = int(library.syscall(ctypes.c_long(_FSMOUNT), context, _CLOEXEC, 0))
    finally:
        os.close(context)
    return None if descriptor < 0 else descriptor


def tracepoint_id(category: str, name: str) -> int | None:
    """The number by which perf attaches to an event; None where the event does not exist here."""
    place = root()
    if place is None:
        return None
    try:
        return int((place / "events" / category / name / "id").read_text())
    except (OSError, ValueError):
        return None


def event_format(category: str, name: str) -> dict[str, tuple[int, int]] | None:
    """Byte offset and size of each field of an event record, by field name."""
    place = root()
    if place is None:
        return None
    try:
        text = (place / "events" / category / name / "format").read_text()
    except OSError:
        return None
    fields: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        if not line.startswith("\tfield:"):
            continue
        parts = dict(p.strip().split(":", 1) for p in line.split(";") if ":" in p)
        name_part = parts["field"].split()[-1].split("[")[0]
        fields[name_part] = (int(parts["offset"]), int(parts["size"]))
    return fields
