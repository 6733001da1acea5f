"""A Linux RAID: ``/sys/block/mdN/md``."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

_KNOBS = (
    Knob(
        "chunk_size",
        Family.BLOCK_SIZE,
        "B",
        "requests that cross a multiple of this go to another member",
        Reach.DESTRUCTIVE,
        default="524288",
        allowed="a power of two from 4096 on; 0 where the level has no chunks",
        risk="a reshape moves all data and takes hours; most levels must be made anew",
        undo="restore the data",
    ),
    Knob(
        "stripe_cache_size",
        Family.QUEUE_DEPTH,
        "pages for each member",
        "stripes of a RAID 5 or 6 that can be worked on at one time",
        Reach.LIVE,
        default="256",
        allowed="17 .. 32768",
        ignored="an array that is assembled anew begins with the default",
        risk="memory: pages times members",
    ),
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    for disk in subjects.disks:
        folder = subjects.roots.sysfs / "block" / disk / "md"
        level = read_text(folder / "level") or ""
        for knob in KIND.knobs:
            if (folder / knob.name).exists():
                value = read_text(folder / knob.name) or None
                yield setting(knob, disk, value, folder / knob.name, level)


KIND = KnobKind("md_sysfs", "a Linux RAID", _KNOBS, _read)
