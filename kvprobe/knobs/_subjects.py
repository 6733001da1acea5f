"""On what settings are read: the disks, controllers and mounts of a path, a disk or the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvprobe.sources.devices import (
    Mount,
    disk_number,
    mounts,
    names_in,
    no_such_disk,
    number_of,
)
from kvprobe.sources.nvme import controllers, subsystems
from kvprobe.sources.topology import Kind, Layer, chain_below, chain_of

_IMAGES = ("squashfs", "erofs", "iso9660")
"""Read-only images: nobody keeps a KV cache there, and some hosts mount dozens."""
_NETWORK = ("nfs", "nfs4")


@dataclass(frozen=True)
class Roots:
    """Where the kernel shows itself."""

    sysfs: Path = Path("/sys")
    procfs: Path = Path("/proc")
    etc: Path = Path("/etc")
    dev: Path = Path("/dev")

    @property
    def mountinfo(self) -> Path:
        """All mounts of this mount namespace."""
        return self.procfs / "self/mountinfo"

    @property
    def diskstats(self) -> Path:
        """All disks with their numbers."""
        return self.procfs / "diskstats"


@dataclass(frozen=True)
class Subjects:
    """On what settings are read; names as sysfs has them, sorted.

    ``host`` says whether settings of the whole machine are read too, ``network`` whether those of
    its TCP connections are.
    """

    disks: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    subsystems: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    host: bool = True
    network: bool = True
    roots: Roots = Roots()

    @cached_property
    def numbers(self) -> dict[int, str]:
        """Names of all disks and partitions by the kernel's dev_t, hidden paths included."""
        return {number: name for name, number in _numbers(self.roots) if number is not None}


def of_host(roots: Roots | None = None) -> Subjects:
    """Every disk that holds a mount or is NVMe, what these lie on, and the host."""
    roots = roots or Roots()
    mounted = [m for m in _mounts(roots) if m.filesystem not in _IMAGES]
    names = {name: number for name, number in _numbers(roots) if number is not None}
    in_use = {mount.device for mount in mounted}
    tops = [name for name in names if name.startswith("nvme") or names[name] in in_use]
    own = {names[name] for name in tops}
    return _subjects(
        roots,
        [chain_below(name, roots.sysfs, roots.mountinfo, roots.diskstats) for name in tops],
        (mount for mount in mounted if mount.device in own or mount.filesystem in _NETWORK),
        host=True,
        idle=(controller.name for controller in controllers(roots.sysfs)),
    )


def of_path(path: str, roots: Roots | None = None) -> Subjects:
    """What serves a file or folder; settings of the host where it is served by NVMe or NFS.

    The node of a device in ``/dev`` is that device.

    Raises:
        KvprobeError: the path does not exist, cannot be looked at, or is the node of no disk.
    """
    roots = roots or Roots()
    chain = chain_of(path, roots.sysfs, roots.mountinfo, roots.diskstats)
    if chain.kind is not Kind.MOUNT:
        return of_device(chain.name, roots)
    points = {layer.name for layer in chain.walk() if layer.kind is Kind.MOUNT}
    # Of several mounts on one point only the last is to be seen.
    at = {mount.point: mount for mount in _mounts(roots) if mount.point in points}
    network = any(mount.filesystem in _NETWORK for mount in at.values())
    return _subjects(roots, [chain], at.values(), host=network)


def of_device(name: str, roots: Roots | None = None) -> Subjects:
    """A disk or partition and what it lies on.

    Raises:
        KvprobeError: there is none of that name.
    """
    roots = roots or Roots()
    wanted = name.removeprefix("/dev/")
    known = dict(_numbers(roots))
    if wanted not in known:
        raise no_such_disk(name, roots.sysfs)
    chain = chain_below(wanted, roots.sysfs, roots.mountinfo, roots.diskstats)
    parts = names_in(roots.sysfs / "block" / wanted)
    own = {known[name] for name in (wanted, *parts) if known.get(name) is not None}
    return _subjects(roots, [chain], (m for m in _mounts(roots) if m.device in own))


def _subjects(
    roots: Roots,
    chains: Iterable[Layer],
    mounted: Iterable[Mount],
    host: bool = False,
    idle: Iterable[str] = (),
) -> Subjects:
    """``idle`` names controllers that are read although no disk of them is."""
    layers = [layer for chain in chains for layer in chain.walk()]
    ways = {*idle, *(layer.name for layer in layers if layer.kind is Kind.CONTROLLER)}
    no_disks = (Kind.MOUNT, Kind.PARTITION, Kind.CONTROLLER)
    return Subjects(
        disks=tuple(sorted({layer.name for layer in layers if layer.kind not in no_disks})),
        controllers=tuple(sorted(ways)),
        subsystems=tuple(s.name for s in subsystems(roots.sysfs) if ways & {*s.controllers}),
        mounts=tuple(mounted),
        host=host or bool(ways),
        network=host
        or any(c.transport == "tcp" for c in controllers(roots.sysfs) if c.name in ways),
        roots=roots,
    )


def _mounts(roots: Roots) -> tuple[Mount, ...]:
    try:
        return mounts(roots.mountinfo)
    except OSError:
        return ()


def _numbers(roots: Roots) -> Iterator[tuple[str, int | None]]:
    """Every disk and partition with its number."""
    block = roots.sysfs / "block"
    for disk in names_in(block):
        yield disk, disk_number(disk, roots.sysfs, roots.diskstats)
        for part in names_in(block / disk):
            if (block / disk / part / "partition").exists():
                yield part, number_of(block / disk / part)
