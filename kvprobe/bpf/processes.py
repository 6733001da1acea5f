"""Processes that are being traced: their descendants and the files that they have open."""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvprobe import schema
from kvprobe.bpf.roots import Mount, Root, kernel_device, mounts
from kvprobe.model import Rows


@dataclass(frozen=True)
class OpenFile:
    """A regular file that a process had open when capture began."""

    tgid: int
    descriptor: int
    device: int
    inode: int
    flags: int
    path: str


def everyone() -> list[int]:
    """Every process but this one."""
    own = os.getpid()
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) != own]


def descendants(tgids: Iterable[int]) -> set[int]:
    """Children of these processes, their children and so on, without the processes themselves."""
    children: dict[int, list[int]] = {}
    for tgid in everyone():
        try:
            # The name, in parentheses, may contain anything; the parent is the second field after.
            fields = Path(f"/proc/{tgid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(tgid)
    found: set[int] = set()
    waiting = list(tgids)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def open_files(tgids: Iterable[int], root: Root | None) -> Iterator[OpenFile]:
    """Regular files and block devices that these processes have open, below ``root`` if given."""
    devices = {mount.number: mount for mount in mounts()}
    for tgid in tgids:
        folder = f"/proc/{tgid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            found = _open_file(tgid, name, devices)
            if found and (root is None or root.contains(found.path)):
                yield found


def already_open_rows(files: Sequence[OpenFile]) -> Rows:
    """The files as ``lookups`` rows of kind ALREADY_OPEN, all of this moment."""
    rows = np.zeros(len(files), schema.numpy_dtype(schema.LOOKUPS))
    now_ns = time.monotonic_ns()
    for row, file in zip(rows, files, strict=True):
        path = file.path.encode("utf-8", "surrogateescape")
        row["start_ns"] = row["end_ns"] = now_ns
        row["inode"], row["fs_device"] = file.inode, file.device
        row["tgid"] = row["tid"] = file.tgid
        row["result"], row["open_flags"] = file.descriptor, file.flags
        row["kind"] = schema.LookupKind.ALREADY_OPEN
        row["cut"] = len(path) >= schema.PATH_BYTES
        row["path"] = path[: schema.PATH_BYTES - 1]
    return rows


def _open_file(tgid: int, name: str, devices: dict[int, Mount]) -> OpenFile | None:
    place = f"/proc/{tgid}/fd/{name}"
    try:
        status = os.stat(place)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            return None
        path = os.readlink(place).removesuffix(" (deleted)")
        lines = Path(f"/proc/{tgid}/fdinfo/{name}").read_text().splitlines()
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    mount = devices.get(int(facts.get("mnt_id", "-1")))
    device = mount.device if mount else kernel_device(status.st_dev)
    flags = int(facts.get("flags", "0"), 8)
    return OpenFile(tgid, int(name), device, status.st_ino, flags, path)


def resolve(row: np.void) -> str | None:
    """The absolute path of a ``lookups`` row with a relative one, while its process still lives.

    The kernel side leaves in ``reserved`` where the path starts: 0 is the working directory, n is
    descriptor n - 1.
    """
    start = int(row["reserved"])
    place = f"/proc/{int(row['tgid'])}/" + ("cwd" if start == 0 else f"fd/{start - 1}")
    try:
        folder = os.readlink(place)
    except OSError:
        return None
    path = bytes(row["path"]).decode("utf-8", "surrogateescape")
    return os.path.normpath(os.path.join(folder, path))


def packed_tgid(tgid: int) -> bytes:
    """Key of the map ``targets``."""
    return struct.pack("=I", tgid)
