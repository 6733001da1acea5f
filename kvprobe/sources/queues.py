"""The hardware queues of a disk: which CPUs hand commands to each, and how many fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvprobe.sources.devices import SYSFS, names_in, read_number, read_text, read_word


@dataclass(frozen=True)
class HardwareQueue:
    """One queue, ``number`` as block rows have it.

    NVMe counts from one, as its queue pair 0 is the admin queue.
    ``commands`` fit at one time: the tags, or ``nr_requests`` where that is less, without those
    reserved for the driver's own commands. Linux before 6.2 gives an NVMe queue of N entries N
    tags, later ones N - 1.
    ``use`` is ``default``, ``read`` or ``poll``, where debugfs tells.
    """

    number: int
    cpus: tuple[int, ...]
    commands: int | None
    use: str | None = None


def hardware_queues(folder: Path, sysfs: Path = SYSFS) -> tuple[HardwareQueue, ...]:
    """The queues of the disk in a sysfs folder, by number; none where the disk has no queues.

    Volumes and multipath heads have none: they hand their requests on.
    """
    numbers = sorted(int(name) for name in names_in(folder / "mq") if name.isdecimal())
    debug = sysfs / "kernel/debug/block" / folder.name
    limit = read_number(folder / "queue/nr_requests")
    return tuple(
        _queue(number, folder / "mq" / str(number), debug / f"hctx{number}/type", limit)
        for number in numbers
    )


def _queue(number: int, folder: Path, use: Path, limit: int | None) -> HardwareQueue:
    tags, reserved = read_number(folder / "nr_tags"), read_number(folder / "nr_reserved_tags")
    if tags is not None and limit is not None:
        tags = min(tags, limit)
    return HardwareQueue(
        number=number,
        cpus=_cpus(read_text(folder / "cpu_list") or ""),
        commands=None if tags is None else max(tags - (reserved or 0), 0),
        use=read_word(use),
    )


def _cpus(text: str) -> tuple[int, ...]:
    """The CPUs of ``0, 1, 2``."""
    words = (word.strip() for word in text.split(","))
    return tuple(int(word) for word in words if word.isdecimal() and len(word) < 7)


def ranges(numbers: tuple[int, ...]) -> str:
    """Numbers as people write them: ``0-3,8``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
