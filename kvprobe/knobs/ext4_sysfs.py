"""An ext4 file system: ``/sys/fs/ext4/DEVICE``."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

INODES_AHEAD = Knob(
    "inode_readahead_blks",
    Family.PREFETCH,
    "blocks",
    "blocks of inodes that are read ahead: helps to open many files, not to read them",
    Reach.LIVE,
    default="32",
    allowed="a power of two",
    ignored="it is about inodes, not data; a new mount begins with the default",
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    mounted = {mount.device for mount in subjects.mounts if mount.filesystem == "ext4"}
    for device in sorted(mounted):
        name = subjects.numbers.get(device)
        if name is None:
            continue
        source = subjects.roots.sysfs / "fs/ext4" / name / "inode_readahead_blks"
        if source.exists():
            yield setting(INODES_AHEAD, name, read_text(source) or None, source)


KIND = KnobKind("ext4_sysfs", "an ext4 file system", (INODES_AHEAD,), _read)
