"""Limits of control groups on the I/O of their processes (cgroup v2, ``io.*``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import head_of, mounts, read_text

_MOST_GROUPS = 4096
"""A host with more has them made by one program that limits all alike."""
_CHARGED = "a limit on a path of a multipath disk does nothing: set it on the multipath disk"


def _limit(name: str, meaning: str, risk: str) -> Knob:
    return Knob(
        name,
        Family.QUEUE_DEPTH,
        "",
        meaning,
        Reach.LIVE,
        default="no limit",
        allowed="one line for each disk, MAJOR:MINOR and the limits",
        ignored=_CHARGED,
        risk=risk,
    )


_KNOBS = (
    _limit("io.max", "bytes and requests a second at most", "reads wait although the disk is idle"),
    _limit("io.latency", "others are slowed down while requests take longer", "others starve"),
    _limit("io.weight", "share of the disk while others want it too", "others get less"),
    _limit("io.cost.qos", "when the cost model slows groups down", "a wrong model wastes the disk"),
    _limit("io.cost.model", "what a request is taken to cost", "a wrong model wastes the disk"),
)
_DEFAULT_LINES = ("", "default 100")


def _read(subjects: Subjects) -> Iterator[Setting]:
    root = _mounted_at(subjects)
    if root is None:
        return
    wanted = {number for number, name in subjects.numbers.items() if name in subjects.disks}
    for group in _groups(root):
        place = "/" + str(group.relative_to(root)) if group != root else "/"
        for knob in KIND.knobs:
            text = read_text(group / knob.name) or ""
            for line in text.splitlines():
                if line not in _DEFAULT_LINES:
                    yield from _line(knob, place, line, group / knob.name, subjects, wanted)


def _line(
    knob: Knob, place: str, line: str, source: Path, subjects: Subjects, wanted: set[int]
) -> Iterator[Setting]:
    """One limit, its disk by name; those of other disks are left out."""
    number, _, limits = line.partition(" ")
    if number == "default":
        yield setting(knob, place, limits, source, "of disks that are not named")
        return
    device = _device(number)
    if device not in wanted or not line.isprintable():
        return
    name = subjects.numbers[device]
    is_path = head_of(name) is not None
    reach = Reach.READ_ONLY if is_path else None
    yield setting(knob, place, f"{name} {limits}", source, _CHARGED if is_path else "", reach)


def _mounted_at(subjects: Subjects) -> Path | None:
    """Where the unified hierarchy is."""
    try:
        found = (m.point for m in mounts(subjects.roots.mountinfo) if m.filesystem == "cgroup2")
    except OSError:
        return None
    point = next(found, None)
    return None if point is None else Path(point)


def _groups(root: Path) -> Iterator[Path]:
    for folder, names, _ in islice(os.walk(root), _MOST_GROUPS):
        names.sort()
        yield Path(folder)


def _device(text: str) -> int | None:
    major, colon, minor = text.partition(":")
    if not (colon and major.isdecimal() and minor.isdecimal() and len(text) < 15):
        return None
    return int(major) << 20 | int(minor)


KIND = KnobKind("cgroup_io", "limits of control groups", _KNOBS, _read)
