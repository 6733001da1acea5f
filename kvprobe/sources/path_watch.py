"""Disks and NVMe paths over time: all that were there at some moment of a recording.

A controller that connects again gets new names and numbers, and rows from before carry the old
ones. So nothing that was seen is forgotten; what is still there is kept as it is now.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvprobe.model import DeviceFacts, NvmePath
from kvprobe.sources.devices import DISKSTATS, MOUNTINFO, SYSFS, devices, names_in, read_word
from kvprobe.sources.nvme import nvme_paths

K = TypeVar("K")
V = TypeVar("V")
Disks: TypeAlias = list[tuple[str, int]]
"""Names and inodes: what was removed and made again has another inode, even under its old name."""
States: TypeAlias = dict[str, str | None]
"""State of each controller by its name."""


class PathWatch:
    """Looks at sysfs; ``look`` about once a second.

    A look lists the NVMe disks and reads the state of each controller, no more. Only when a disk
    is new or gone is everything read again.
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
        self._disks: Disks = []
        self._states: States = {}
        self._present: list[tuple[object, ...]] = []
        self._paths: dict[tuple[object, ...], NvmePath] = {}
        self._devices: dict[int, DeviceFacts] = {}
        self.look(closely=True)

    @property
    def paths(self) -> tuple[NvmePath, ...]:
        """Every path seen so far; of two with one number the later one was seen later."""
        return tuple(self._paths.values())

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Every whole disk seen so far; of two with one number the one that had it last."""
        return tuple(self._devices.values())

    def look(self, closely: bool = False) -> None:
        """Take in what is there now; ``closely`` also where nothing seems to have changed."""
        disks, states = _nvme_disks(self._sysfs / "block"), self._read_states()
        if closely or disks != self._disks:
            self._read_all()
        elif states != self._states:
            for identity in self._present:
                path = self._paths[identity]
                state = states.get(f"nvme{path.controller}", path.state)
                self._paths[identity] = replace(path, state=state)
        self._disks, self._states = disks, states

    def _read_all(self) -> None:
        self._present = []
        for path in nvme_paths(self._sysfs, self._diskstats):
            identity = (*path.key, path.device, path.name)
            self._present.append(identity)
            _take(self._paths, identity, path)
        for disk in devices(self._sysfs, self._mountinfo, self._diskstats):
            _take(self._devices, disk.device, disk)

    def _read_states(self) -> States:
        folder = self._sysfs / "class/nvme"
        return {name: read_word(folder / name / "state") for name in names_in(folder)}


def _take(seen: dict[K, V], identity: K, value: V) -> None:
    """Keep the latest facts, behind all that had the same number before."""
    seen.pop(identity, None)
    seen[identity] = value


def _nvme_disks(folder: Path) -> Disks:
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, e.inode()) for e in entries if e.name.startswith("nvme"))
    except OSError:
        return []
