"""A directory as the kernel side sees it: device and inode of it and of what is mounted below."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.model import Missing

ROOT, ABOVE_ROOT = 1, 2
"""Values of the map ``roots`` (KV_ROOT, KV_ABOVE_ROOT in probes/filters.bpf.h)."""
PREFIX_BYTES = 128
"""How much of a root's path the kernel compares; the rest is compared here."""


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: id, device of the superblock as a dev_t, where it is mounted."""

    number: int
    device: int
    point: str


@dataclass(frozen=True)
class Root:
    """A directory to which rows are limited.

    ``entries`` are (device, inode, ``ROOT`` or ``ABOVE_ROOT``): the directory itself first, then
    the file systems mounted below it, then the directories on the way to it. ``prefixes`` are the
    names it goes by, as given and as resolved, each with a slash at its end.
    """

    entries: tuple[tuple[int, int, int], ...]
    prefixes: tuple[str, ...]
    missing: tuple[Missing, ...] = ()

    @property
    def device(self) -> int:
        """Device of the directory's superblock."""
        return self.entries[0][0]

    @property
    def inode(self) -> int:
        """Inode of the directory."""
        return self.entries[0][1]

    @property
    def has_mounts(self) -> bool:
        """Whether other file systems are mounted below."""
        return sum(1 for entry in self.entries if entry[2] == ROOT) > 1

    def contains(self, path: str) -> bool:
        """Whether an absolute path lies below, by name."""
        return path.startswith(self.prefixes)


def kernel_device(st_dev: int) -> int:
    """``os.stat().st_dev`` as the kernel's own dev_t, which rows carry: major << 20 | minor."""
    return os.major(st_dev) << 20 | os.minor(st_dev)


def read_root(path: str) -> Root:
    """Look a directory up.

    Raises:
        KvprobeError: it is no directory, or not an absolute path.
    """
    if not os.path.isabs(path):
        raise KvprobeError(f"root {path!r} is not an absolute path", "give the full path")
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise KvprobeError(f"no directory at {path}", "give a directory that exists")
    table = mounts()
    entries = [_entry(real, table, ROOT)]
    for mount in table:
        if mount.point.startswith(f"{real.rstrip('/')}/"):
            try:
                entries.append((mount.device, os.stat(mount.point).st_ino, ROOT))
            except OSError:
                continue  # it cannot be used through this path either
    entries += [_entry(str(above), table, ABOVE_ROOT) for above in Path(real).parents]
    names = dict.fromkeys((f"{os.path.normpath(path).rstrip('/')}/", f"{real.rstrip('/')}/"))
    return Root(tuple(dict.fromkeys(entries)), tuple(names), _other_numbers(real, entries[0][0]))


def mounts() -> tuple[Mount, ...]:
    """What is mounted where in this mount namespace, in order of mounting."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _parent, device, _inside, point = line.split(" ", 5)[:5]
        major, minor = device.split(":")
        name = point.encode().decode("unicode_escape") if "\\" in point else point
        found.append(Mount(int(number), int(major) << 20 | int(minor), name))
    return tuple(found)


def packed_prefix(prefix: str) -> bytes:
    """``struct kv_prefix``: the path's first bytes and as many mask bytes."""
    text = prefix.encode()[:PREFIX_BYTES]
    mask = b"\xff" * len(text)
    return text.ljust(PREFIX_BYTES, b"\0") + mask.ljust(PREFIX_BYTES, b"\0")


def packed_file(device: int, inode: int) -> bytes:
    """``struct kv_file``, the key of the maps ``roots`` and ``traffic``."""
    return struct.pack("=QQ", inode, device)


def _entry(path: str, table: tuple[Mount, ...], what: int) -> tuple[int, int, int]:
    """Longest mount point wins; of equal ones the last, which covers the others."""
    inside = [m for m in table if m.point == "/" or f"{path}/".startswith(f"{m.point}/")]
    longest = max((len(m.point) for m in inside), default=0)
    device = next((m.device for m in reversed(inside) if len(m.point) == longest), None)
    status = os.stat(path)
    return (kernel_device(status.st_dev) if device is None else device, status.st_ino, what)


def _other_numbers(real: str, device: int) -> tuple[Missing, ...]:
    shown = kernel_device(os.stat(real).st_dev)
    if shown == device:
        return ()
    return (
        Missing(
            "the file system's device number",
            f"stat() of {real} shows another device number than its superblock has",
            "fs_device of rows is the superblock's; inode numbers may repeat between subvolumes",
        ),
    )
