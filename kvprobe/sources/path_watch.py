"""Disks and NVMe paths over time: all that were there at some moment of a recording.

A controller that connects again gets new names and numbers, and rows from before carry the old
ones. So nothing that was seen is forgotten; what is still there is kept as it is now.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvprobe.model import DeviceFacts, NvmePath
from kvprobe.sources.devices import DISKSTATS, MOUNTINFO, SYSFS, devices, names_in, read_text
from kvprobe.sources.nvme import nvme_paths

K = TypeVar("K")
V = TypeVar("V")
Signature: TypeAlias = tuple[tuple[str, int | str | None], ...]


class PathWatch:
    """Looks at sysfs; ``look`` about once a second.

    A look lists the NVMe disks and reads the state of each controller, no more. Only when one of
    them is new, gone or in another state is everything read again.
    """

    def __init__(
        self,
        sysfs: Path = SYSFS,
        mountinfo: Path = MOUNTINFO,
        diskstats: Path = DISKSTATS,
    ) -> None:
        self._sysfs = sysfs
        self._mountinfo = mountinfo
        self._diskstats = diskstats
        self._signature: Signature | None = None
        self._paths: dict[tuple[object, ...], NvmePath] = {}
        self._devices: dict[tuple[int, str], DeviceFacts] = {}
        self.look()

    @property
    def paths(self) -> tuple[NvmePath, ...]:
        """Every path seen so far; of two with one number the later one was seen later."""
        return tuple(self._paths.values())

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Every whole disk seen so far; of two with one number the later one was seen later."""
        return tuple(self._devices.values())

    def look(self, closely: bool = False) -> None:
        """Take in what is there now; ``closely`` also where nothing seems to have changed."""
        signature = self._look_quickly()
        if signature == self._signature and not closely:
            return
        self._signature = signature
        for path in nvme_paths(self._sysfs, self._diskstats):
            identity = (*path.key, path.device, path.name)
            _take(self._paths, identity, path)
        for disk in devices(self._sysfs, self._mountinfo, self._diskstats):
            _take(self._devices, (disk.device, disk.name), disk)

    def _look_quickly(self) -> Signature:
        """Whatever was removed and made again has another inode, even under the same name."""
        states = (
            (name, read_text(self._sysfs / "class/nvme" / name / "state"))
            for name in names_in(self._sysfs / "class/nvme")
        )
        return (*_nvme_disks(self._sysfs / "block"), *states)


def _take(seen: dict[K, V], identity: K, value: V) -> None:
    """Keep the latest facts, behind all that had the same number before."""
    seen.pop(identity, None)
    seen[identity] = value


def _nvme_disks(folder: Path) -> list[tuple[str, int | str | None]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, e.inode()) for e in entries if e.name.startswith("nvme"))
    except OSError:
        return []
