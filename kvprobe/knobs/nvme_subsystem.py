"""A subsystem: which path the next request takes (``/sys/class/nvme-subsystem/NAME``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.nvme import native_multipath, subsystems

IOPOLICY = Knob(
    "iopolicy",
    Family.QUEUE_DEPTH,
    "",
    "which path a request takes: that of its NUMA node, each in turn, or the least busy",
    Reach.LIVE,
    default="the parameter iopolicy of nvme_core, numa unless set",
    allowed="numa round-robin, from Linux 6.11 queue-depth",
    ignored="disconnecting the last path loses it: set it with a udev rule",
    risk="round-robin ignores that one path is slower; array vendors recommend different ones",
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    joined = native_multipath(subjects.roots.sysfs)
    for found in subsystems(subjects.roots.sysfs):
        if found.name not in subjects.subsystems or found.iopolicy is None:
            continue
        source = subjects.roots.sysfs / "class/nvme-subsystem" / found.name / "iopolicy"
        ways = len(found.controllers)
        note = f"{ways} controller{'' if ways == 1 else 's'}"
        if joined is False:
            note += "; native multipath is off: it does nothing"
        elif ways == 1:
            note += ": there is nothing to choose"
        yield setting(IOPOLICY, found.name, found.iopolicy, source, note)


KIND = KnobKind("nvme_subsystem", "an NVMe subsystem", (IOPOLICY,), _read)
