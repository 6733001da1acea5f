"""The chain that serves a path: file system, stacked devices, multipath head, path, controller.

``chain_of`` gives it as a tree, because a volume can lie on several disks and a multipath disk has
several paths. Everything is read from sysfs; what is missing there is missing in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.sources.devices import (
    DISKSTATS,
    MOUNTINFO,
    SYSFS,
    disk_number,
    head_of,
    names_in,
    number_of,
    read_number,
    read_word,
    storage_of,
)
from kvprobe.sources.nvme import controller_of, is_head, paths_of_head, resolved
from kvprobe.sources.queues import HardwareQueue, hardware_queues

_MOST_LAYERS = 16
"""A volume on a loop device on a volume .. ends somewhere; a ring of them must not hang."""
_DM_KINDS = {
    "LVM": "LVM volume",
    "mpath": "dm multipath",
    "CRYPT": "encrypted",
    "part": "partition",
}
"""What made a dm device, by the first part of its uuid."""

Fact = str | int | None


class Kind(StrEnum):
    """What a layer is."""

    MOUNT = "mount"
    PARTITION = "partition"
    DM = "dm"
    MD = "md"
    LOOP = "loop"
    DISK = "disk"
    HEAD = "head"
    PATH = "path"
    CONTROLLER = "controller"


@dataclass(frozen=True)
class Layer:
    """One layer and what is below it.

    ``device`` is the kernel's dev_t as block rows carry it, where it has one. ``queues`` are those
    to which commands are handed here.
    """

    kind: Kind
    name: str
    device: int | None = None
    facts: dict[str, Fact] = field(default_factory=dict)
    queues: tuple[HardwareQueue, ...] = ()
    below: tuple[Layer, ...] = ()

    def walk(self) -> Iterator[Layer]:
        """This layer and all below it, from the top."""
        yield self
        for layer in self.below:
            yield from layer.walk()


def chain_of(
    path: str, sysfs: Path = SYSFS, mountinfo: Path = MOUNTINFO, diskstats: Path = DISKSTATS
) -> Layer:
    """What serves a file or folder, its mount on top; or the device behind a node in ``/dev``.

    Raises:
        KvprobeError: as ``storage_of``.
    """
    return _Chain(sysfs, mountinfo, diskstats).of_path(path, _MOST_LAYERS)


def chain_below(
    name: str, sysfs: Path = SYSFS, mountinfo: Path = MOUNTINFO, diskstats: Path = DISKSTATS
) -> Layer:
    """A whole disk, a hidden path or a partition, and what is below it."""
    return _Chain(sysfs, mountinfo, diskstats).of_device(name, _MOST_LAYERS)


@dataclass(frozen=True)
class _Chain:
    sysfs: Path
    mountinfo: Path
    diskstats: Path

    def of_path(self, path: str, depth: int) -> Layer:
        storage = storage_of(path, self.sysfs, self.mountinfo)
        below: tuple[Layer, ...] = ()
        if storage.device is not None:
            device = self.of_device(storage.partition or storage.device.name, depth - 1)
            if not storage.filesystem:
                return device
            below = (device,)
        facts: dict[str, Fact] = {"filesystem": storage.filesystem}
        if storage.why:
            facts["why"] = storage.why
        return Layer(Kind.MOUNT, storage.mount_point or path, storage.fs_device, facts, below=below)

    def of_device(self, name: str, depth: int) -> Layer:
        if depth <= 0:
            return Layer(Kind.DISK, name)
        if parent := self._parent_of(name):
            folder = self.sysfs / "block" / parent / name
            facts: dict[str, Fact] = {"size_bytes": _bytes(folder / "size")}
            below = (self.of_device(parent, depth - 1),)
            return Layer(Kind.PARTITION, name, number_of(folder), facts, below=below)
        folder = self.sysfs / "block" / name
        if name.startswith("loop"):
            return self._loop(name, folder, depth)
        if is_head(name, self.sysfs):
            return self._head(name, folder)
        if slaves := names_in(folder / "slaves"):
            return self._stacked(name, folder, slaves, depth)
        return self._disk(name, folder)

    def _loop(self, name: str, folder: Path, depth: int) -> Layer:
        """A loop device lies on the file behind it, which has a chain of its own."""
        backing = read_word(folder / "loop/backing_file")
        facts: dict[str, Fact] = {
            "size_bytes": _bytes(folder / "size"),
            "backing_file": backing,
        }
        below: tuple[Layer, ...] = ()
        if backing:
            try:
                below = (self.of_path(backing, depth - 1),)
            except KvprobeError as error:  # deleted, or seen from another mount namespace
                facts["why"] = error.message
        return Layer(
            Kind.LOOP, name, number_of(folder), facts, hardware_queues(folder, self.sysfs), below
        )

    def _stacked(self, name: str, folder: Path, slaves: list[str], depth: int) -> Layer:
        facts: dict[str, Fact] = {"size_bytes": _bytes(folder / "size")}
        kind = Kind.MD if name.startswith("md") else Kind.DM
        if kind is Kind.DM:
            maker = (read_word(folder / "dm/uuid") or "").partition("-")[0]
            facts |= {"volume": read_word(folder / "dm/name"), "made_by": _DM_KINDS.get(maker)}
        else:
            facts |= {
                "level": read_word(folder / "md/level"),
                "chunk_bytes": read_number(folder / "md/chunk_size"),
            }
        below = tuple(self.of_device(slave, depth - 1) for slave in slaves)
        return Layer(kind, name, number_of(folder), facts, below=below)

    def _head(self, name: str, folder: Path) -> Layer:
        subsystem = resolved(folder / "device")
        facts: dict[str, Fact] = {
            "size_bytes": _bytes(folder / "size"),
            "subsystem": subsystem.name,
            "nqn": read_word(subsystem / "subsysnqn"),
            "nsid": read_number(folder / "nsid"),
            "iopolicy": read_word(subsystem / "iopolicy"),
        }
        paths = tuple(
            self._disk(path, self.sysfs / "block" / path)
            for path in paths_of_head(name, self.sysfs)
        )
        return Layer(Kind.HEAD, name, number_of(folder), facts, below=paths)

    def _disk(self, name: str, folder: Path) -> Layer:
        """A disk that commands are handed to; one of NVMe has its controller below it."""
        is_path = head_of(name) is not None
        facts: dict[str, Fact] = {"size_bytes": _bytes(folder / "size")}
        below: tuple[Layer, ...] = ()
        if name.startswith("nvme"):
            facts["nsid"] = read_number(folder / "nsid")
            if is_path:
                facts["ana_state"] = read_word(folder / "ana_state")
            below = (_controller(resolved(folder / "device")),)
        device = disk_number(name, self.sysfs, self.diskstats)
        kind = Kind.PATH if is_path else Kind.DISK
        return Layer(kind, name, device, facts, hardware_queues(folder, self.sysfs), below)

    def _parent_of(self, name: str) -> str | None:
        """The whole disk of a partition; None where the name is not one of a partition."""
        if (self.sysfs / "block" / name).exists():
            return None
        disks = names_in(self.sysfs / "block")
        return next(
            (d for d in disks if (self.sysfs / "block" / d / name / "partition").exists()), None
        )


def _controller(folder: Path) -> Layer:
    found = controller_of(folder)
    facts: dict[str, Fact] = {
        "transport": found.transport,
        "address": found.address,
        "source": found.source,
        "state": found.state,
        "io_queues": found.io_queues,
        "queue_size": found.queue_size,
        "numa_node": found.numa_node,
        "controller_id": found.controller_id,
        "nqn": found.nqn,
    }
    return Layer(Kind.CONTROLLER, found.name, None, facts)


def _bytes(path: Path) -> int | None:
    sectors = read_number(path)
    return None if sectors is None else sectors * 512
