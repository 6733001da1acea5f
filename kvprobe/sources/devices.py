"""Block devices as sysfs shows them, and the way from a path to the device that serves it.

Everything is read from sysfs, /proc/self/mountinfo and /proc/diskstats: no tool is run, nothing is
opened for I/O. A file that is missing or reads as nonsense makes its fact unknown, never an error.

The disks of the single paths under a native NVMe multipath head are hidden: no node in /dev and no
``dev`` file in sysfs. Block requests carry their numbers all the same; /proc/diskstats has them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.model import DeviceFacts

SYSFS = Path("/sys")
MOUNTINFO = Path("/proc/self/mountinfo")
DISKSTATS = Path("/proc/diskstats")

_OCTAL = re.compile(r"\\([0-7]{3})")
_PATH_DISK = re.compile(r"(nvme\d+)c\d+(n\d+)")
"""Subsystem, controller and namespace of one path; the head's name lacks the controller."""
_BUSES = (("/virtio", "virtio"), ("/ata", "sata"), ("/usb", "usb"))
"""Where a device hangs, by a word in its sysfs path."""


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. ``device`` is the kernel's dev_t of the file system."""

    device: int
    point: str
    filesystem: str
    source: str
    options: str


@dataclass(frozen=True)
class PathStorage:
    """What serves a path.

    ``filesystem`` and ``mount_point`` are empty where the path is the node of a device itself.
    ``device`` is the whole disk, None where no single block device does (``why`` says so).
    ``fs_device`` is the number that stat() shows, the kernel's dev_t. ``below`` names the devices
    under a stacked one, ``backing_file`` the file behind a loop device.
    """

    path: str
    fs_device: int
    filesystem: str
    mount_point: str
    device: DeviceFacts | None
    why: str = ""
    partition: str | None = None
    below: tuple[str, ...] = ()
    backing_file: str | None = None


def kernel_device(number: int) -> int:
    """The kernel's dev_t (major << 20 | minor) of a device number as stat() returns it."""
    return os.major(number) << 20 | os.minor(number)


def devices(
    sysfs: Path = SYSFS, mountinfo: Path = MOUNTINFO, diskstats: Path = DISKSTATS
) -> tuple[DeviceFacts, ...]:
    """Every whole disk of this machine that has a size, hidden paths included, ordered by name."""
    mounted = mounts(mountinfo)
    found = (facts_of(name, sysfs, mounted, diskstats) for name in disk_names(sysfs))
    return tuple(facts for facts in found if facts is not None)


def disk_names(sysfs: Path = SYSFS) -> list[str]:
    """Names of the whole disks that have a size, hidden paths included; one without is not in use.

    A size that cannot be read is not taken for none.
    """
    block = sysfs / "block"
    return [name for name in names_in(block) if read_number(block / name / "size") != 0]


def no_such_disk(name: str, sysfs: Path = SYSFS) -> KvprobeError:
    """What to say of a name that no disk has; the hint lists those there are."""
    known = ", ".join(disk_names(sysfs))
    return KvprobeError(f"no block device {name!r}", f"whole disks here: {known or 'none'}")


def facts_of(
    name: str, sysfs: Path, mounted: Iterable[Mount], diskstats: Path = DISKSTATS
) -> DeviceFacts | None:
    """Facts of one whole disk; None if it is not, or no longer, there.

    The hidden disk of a path has the mounts of its head.
    """
    folder = sysfs / "block" / name
    device = disk_number(name, sysfs, diskstats)
    if device is None:
        return None
    queue = folder / "queue"
    sectors = read_number(folder / "size")
    rotational = read_number(queue / "rotational")
    own = _numbers_mounted(sysfs / "block" / (head_of(name) or name))
    largest_kib = read_number(queue / "max_sectors_kb")
    ahead_kib = read_number(queue / "read_ahead_kb")
    return DeviceFacts(
        device=device,
        name=name,
        transport=_transport(name, folder),
        size_bytes=None if sectors is None else sectors * 512,
        rotational=None if rotational is None else rotational == 1,
        scheduler=_scheduler(queue / "scheduler"),
        nr_requests=read_number(queue / "nr_requests"),
        read_ahead_bytes=None if ahead_kib is None else ahead_kib << 10,
        max_request_bytes=None if largest_kib is None else largest_kib << 10,
        logical_block_bytes=read_number(queue / "logical_block_size"),
        mounts=tuple(dict.fromkeys(m.point for m in mounted if m.device in own)),
    )


def disk_number(name: str, sysfs: Path = SYSFS, diskstats: Path = DISKSTATS) -> int | None:
    """The kernel's dev_t of a whole disk, also of a hidden one; None if it is not there."""
    folder = sysfs / "block" / name
    number = number_of(folder)
    if number is None and folder.is_dir():
        number = _disk_numbers(diskstats).get(name)
    return number


def head_of(name: str) -> str | None:
    """The multipath disk that a hidden path disk belongs to: nvme0n3 of nvme0c1n3; else None."""
    found = _PATH_DISK.fullmatch(name)
    return None if found is None else found[1] + found[2]


def storage_of(path: str, sysfs: Path = SYSFS, mountinfo: Path = MOUNTINFO) -> PathStorage:
    """Which device serves a file or folder, or is behind a node such as ``/dev/nvme0n1``.

    Raises:
        KvprobeError: the path does not exist, cannot be looked at, or is the node of no disk.
    """
    try:
        real = os.path.realpath(path, strict=True)
        status = os.stat(real)
    except OSError as error:
        raise KvprobeError(
            f"cannot look at {path}: {error.strerror}", "name a folder that exists"
        ) from error
    device = kernel_device(status.st_dev)
    mounted = mounts(mountinfo)
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        return _storage_of_node(path, status, sysfs, mounted)
    mount = _mount_of(real, device, mounted)
    if mount is None:
        return PathStorage(real, device, "unknown", "", None, "its mount is not in mountinfo")
    disk, partition, why = _disk_of(device, mount, sysfs, mounted)
    found = PathStorage(real, device, mount.filesystem, mount.point, disk, why, partition)
    return _with_layers(found, sysfs)


def _storage_of_node(
    path: str, status: os.stat_result, sysfs: Path, mounted: tuple[Mount, ...]
) -> PathStorage:
    number = kernel_device(status.st_rdev)
    is_block = stat.S_ISBLK(status.st_mode)
    found = _disk_and_partition(number, sysfs, mounted) if is_block else None
    if found is None:
        raise KvprobeError(
            f"{path} is a device, but no disk", "name a folder, or a disk such as /dev/nvme0n1"
        )
    real = os.path.realpath(path)
    return _with_layers(PathStorage(real, number, "", "", found[0], "", found[1]), sysfs)


def _with_layers(storage: PathStorage, sysfs: Path) -> PathStorage:
    """The same with what the disk lies on, where it is a stacked one."""
    if storage.device is None:
        return storage
    folder = sysfs / "block" / storage.device.name
    return replace(
        storage,
        below=tuple(names_in(folder / "slaves")),
        backing_file=read_text(folder / "loop" / "backing_file"),
    )


def mounts(mountinfo: Path = MOUNTINFO) -> tuple[Mount, ...]:
    """All mounts of this mount namespace, in the order in which they were made."""
    return tuple(_parse_mounts(mountinfo.read_text(errors="replace").splitlines()))


def _parse_mounts(lines: Iterable[str]) -> Iterator[Mount]:
    # id parent major:minor root point options [optional ..] - filesystem source super-options
    for line in lines:
        front, separator, back = line.partition(" - ")
        fields, rest = front.split(" "), back.split(" ")
        number = _colon_number(fields[2]) if len(fields) >= 6 else None
        if separator and number is not None and len(rest) >= 2:
            options = rest[2] if len(rest) > 2 else ""
            yield Mount(number, *map(_unescape, (fields[4], rest[0], rest[1], options)))


def _mount_of(path: str, device: int, mounted: tuple[Mount, ...]) -> Mount | None:
    """The mount that the path is in: the longest mount point above it, the latest of equals."""
    above = [m for m in mounted if _is_below(path, m.point)]
    # btrfs shows another device number in stat() than in mountinfo, so equality is a preference.
    candidates = [m for m in above if m.device == device] or above
    return max(reversed(candidates), key=lambda m: len(m.point), default=None)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _disk_of(
    device: int, mount: Mount, sysfs: Path, mounted: tuple[Mount, ...]
) -> tuple[DeviceFacts | None, str | None, str]:
    """The whole disk, the partition's name if it is one, and why not if there is no disk."""
    for number in (device, mount.device, _source_number(mount.source)):
        found = None if number is None else _disk_and_partition(number, sysfs, mounted)
        if found is not None:
            return *found, ""
    return None, None, _without_device(mount)


def _disk_and_partition(
    number: int, sysfs: Path, mounted: tuple[Mount, ...]
) -> tuple[DeviceFacts, str | None] | None:
    link = sysfs / "dev" / "block" / f"{number >> 20}:{number & 0xFFFFF}"
    try:
        place = link.resolve(strict=True)
    except OSError:
        return None
    is_partition = (place / "partition").exists()
    facts = facts_of(place.parent.name if is_partition else place.name, sysfs, mounted)
    return None if facts is None else (facts, place.name if is_partition else None)


def _source_number(source: str) -> int | None:
    """Device number of a mount's source, where that is a block device (btrfs)."""
    try:
        status = os.stat(source)
    except OSError:
        return None
    return kernel_device(status.st_rdev) if status.st_mode & 0o170000 == 0o060000 else None


def _without_device(mount: Mount) -> str:
    if mount.filesystem in ("tmpfs", "ramfs", "devtmpfs"):
        return f"{mount.filesystem} keeps its files in memory"
    if mount.filesystem == "overlay":
        found = re.search(r"upperdir=([^,]*)", mount.options)
        where = f": look at {found.group(1)}" if found else ""
        return f"overlay passes I/O to another file system{where}"
    if mount.filesystem.startswith(
        ("nfs", "ceph", "lustre", "cifs", "smb", "fuse", "9p", "virtiofs")
    ):
        return f"{mount.filesystem} is served over a network or by another process"
    return f"{mount.filesystem} on {mount.source} is not one block device"


# ---------------------------------------------------------------- sysfs


def _transport(name: str, folder: Path) -> str:
    """How commands reach the device: ``nvme tcp``, ``virtio``, ``loop``, ``dm`` .. or unknown."""
    for prefix, kind in (("loop", "loop"), ("dm-", "dm"), ("md", "md"), ("zram", "zram")):
        if name.startswith(prefix):
            return kind
    if name.startswith("nvme"):
        return f"nvme {_nvme_transport(folder / 'device') or 'unknown'}"
    try:
        place = str(folder.resolve(strict=True))
    except OSError:
        return "unknown"
    return next((kind for word, kind in _BUSES if word in place), "unknown")


def _nvme_transport(parent: Path) -> str | None:
    """Of a controller, or of the controllers of a subsystem (native multipath)."""
    own = read_text(parent / "transport")
    if own:
        return own
    kinds = {read_text(path) for path in parent.glob("nvme*/transport")} - {None}
    return " ".join(sorted(kind for kind in kinds if kind)) or None


def _numbers_mounted(folder: Path) -> set[int | None]:
    """The numbers under which a disk can be mounted: its own and those of its partitions."""
    parts = (folder / name for name in names_in(folder))
    return {number_of(folder), *(number_of(p) for p in parts if (p / "partition").exists())}


def _disk_numbers(diskstats: Path) -> dict[str, int]:
    """The dev_t of every disk and partition, by name."""
    lines = (read_text(diskstats) or "").splitlines()
    found = (line.split(maxsplit=3) for line in lines)
    return {
        words[2]: number
        for words in found
        if len(words) > 2 and (number := _colon_number(":".join(words[:2]))) is not None
    }


def _scheduler(path: Path) -> str | None:
    text = read_word(path) or ""
    chosen = re.search(r"\[([\w-]+)\]", text)
    return chosen.group(1) if chosen else text or None


def number_of(folder: Path) -> int | None:
    """The dev_t in the ``dev`` file of a disk or partition."""
    text = read_text(folder / "dev")
    return _colon_number(text) if text else None


def _colon_number(text: str) -> int | None:
    """``259:1`` as the kernel's dev_t."""
    found = re.fullmatch(r"(\d{1,7}):(\d{1,7})", text)
    return int(found.group(1)) << 20 | int(found.group(2)) if found else None


def read_number(path: Path) -> int | None:
    """A sysfs attribute that is one number of at most 18 digits, or None."""
    text = read_text(path)
    return int(text) if text and len(text) < 19 and text.isdecimal() else None


def read_text(path: Path) -> str | None:
    """A sysfs attribute, or None where it is not there or cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_word(path: Path) -> str | None:
    """A sysfs attribute of printable text, which may come from a target; None for anything else."""
    text = read_text(path)
    return text if text and text.isprintable() else None


def names_in(folder: Path) -> list[str]:
    """What is in a folder, sorted; nothing where it is not there."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found.group(1), 8)), text)
