"""Trees as real kernels show them, made again from ``tests/data/sysfs`` (see ``copy_sysfs.py``)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvprobe.knobs._subjects import Roots

DATA = Path(__file__).parents[1] / "data/sysfs"


@dataclass(frozen=True)
class Tree:
    """A machine below ``root``."""

    root: Path

    @property
    def roots(self) -> Roots:
        return Roots(*(self.root / name for name in ("sys", "proc", "etc", "dev")))

    @property
    def sysfs(self) -> Path:
        return self.roots.sysfs

    @property
    def mountinfo(self) -> Path:
        return self.roots.mountinfo

    @property
    def diskstats(self) -> Path:
        return self.roots.diskstats

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def names() -> list[str]:
    """All recorded machines, KERNEL-KIND."""
    return sorted(path.stem for path in DATA.glob("*.json"))


MULTIPATH = ("6.1-rdma", "6.1-tcp", "6.12-rdma", "6.12-tcp")
LOCAL = ("6.1-pci", "6.12-pci")
SEPARATE = ("6.12-separate",)
"""Two paths without native multipath."""


def plant(name: str, root: Path) -> Tree:
    """Make the tree of a recorded machine below ``root``, which is empty."""
    recorded = json.loads((DATA / f"{name}.json").read_text())
    for path, text in recorded["files"].items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            place.mkdir()  # reading a folder fails as reading such a file does
        else:
            place.write_text(text)
    for path, target in recorded["links"].items():
        place, there = root / path.lstrip("/"), root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        there.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink() and not place.exists():
            place.symlink_to(os.path.relpath(there, place.parent))
    (root / "proc").mkdir(exist_ok=True)
    return Tree(root)
