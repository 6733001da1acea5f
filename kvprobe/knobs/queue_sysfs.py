"""The queue of a disk: ``/sys/block/DISK/queue``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import head_of, names_in, read_text
from kvprobe.sources.nvme import is_head

_FROM_DEVICE = "what the device, its target or the transport says"

_SIZES = (
    Knob(
        "max_sectors_kb",
        Family.BLOCK_SIZE,
        "KiB",
        "the largest request; longer ones are cut",
        Reach.LIVE,
        default="1280 up to Linux 6.16, 4096 from 6.17, at most max_hw_sectors_kb",
        allowed="4 .. max_hw_sectors_kb",
        ignored="a rescan of a namespace sets that of a path back (Linux 6.1), or lowers that of "
        "the multipath disk to the least of its paths (6.12)",
        risk="longer requests hold up short ones behind them; some targets fail beyond 1 MiB",
    ),
    Knob(
        "max_hw_sectors_kb",
        Family.BLOCK_SIZE,
        "KiB",
        "the largest request that the device takes (NVMe: MDTS)",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "max_segments",
        Family.BLOCK_SIZE,
        "segments",
        "pieces of memory in one request; buffers of small pages are cut by it",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "max_segment_size",
        Family.BLOCK_SIZE,
        "B",
        "the longest piece of memory in a request",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "virt_boundary_mask",
        Family.BLOCK_SIZE,
        "B",
        "pieces of memory in one request meet at multiples of this plus one",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "dma_alignment",
        Family.BLOCK_SIZE,
        "B",
        "direct I/O from memory that is not aligned to this plus one is refused",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "logical_block_size",
        Family.BLOCK_SIZE,
        "B",
        "direct I/O is in multiples of this",
        Reach.DESTRUCTIVE,
        default="512 or 4096, as the namespace was formatted",
        allowed="the LBA formats of the namespace",
        risk="nvme format destroys all data; arrays often forbid it",
        undo="format again and restore the data",
    ),
    Knob(
        "physical_block_size",
        Family.BLOCK_SIZE,
        "B",
        "shorter writes make the device read and write back",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "minimum_io_size",
        Family.BLOCK_SIZE,
        "B",
        "the shortest request that is not slow (NVMe: NPWG)",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "optimal_io_size",
        Family.BLOCK_SIZE,
        "B",
        "the preferred request (NVMe: NOWS); 0: none is named",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "chunk_sectors",
        Family.BLOCK_SIZE,
        "512 B",
        "requests that cross a multiple of this are cut (NVMe: NOIOB); 0: nowhere",
        Reach.READ_ONLY,
        default=_FROM_DEVICE,
    ),
    Knob(
        "nomerges",
        Family.BLOCK_SIZE,
        "",
        "whether neighbours become one request: 0 always, 1 the cheap way only, 2 never",
        Reach.LIVE,
        default="0",
        allowed="0 1 2",
        risk="2 leaves small sequential requests as small as they are",
    ),
)

_DEPTHS = (
    Knob(
        "nr_requests",
        Family.QUEUE_DEPTH,
        "requests",
        "requests in flight on each hardware queue",
        Reach.LIVE,
        default="the queue size without a scheduler, 2 * min(queue size, 128) with one",
        allowed="1 .. queue size without a scheduler",
        ignored="choosing another scheduler sets it anew",
        risk="less is less throughput, more is more latency",
    ),
    Knob(
        "scheduler",
        Family.QUEUE_DEPTH,
        "",
        "who orders the requests of this disk",
        Reach.LIVE,
        default="mq-deadline for a disk with one I/O queue, none with several",
        risk="the queue is frozen while it changes; a scheduler costs CPU for each request",
    ),
    Knob(
        "rq_affinity",
        Family.QUEUE_DEPTH,
        "",
        "where a completion runs: 0 anywhere, 1 near the submitter, 2 on the submitting CPU",
        Reach.LIVE,
        default="1",
        allowed="0 1 2",
        ignored="3 and more are accepted without an error and change nothing",
        risk="2 costs an interrupt to another CPU for each completion",
    ),
    Knob(
        "wbt_lat_usec",
        Family.QUEUE_DEPTH,
        "us",
        "writes are held back while reads take longer than this; 0: never",
        Reach.LIVE,
        default="2000, rotating disks 75000",
        allowed="0 and more, -1 for the default",
        risk="0 lets writes of the cache slow down reads; a low one slows down writes",
    ),
    Knob(
        "io_poll",
        Family.QUEUE_DEPTH,
        "",
        "1: there are queues whose completions are polled for",
        Reach.RECONNECT,
        default="0",
        allowed="1 where the controller has poll queues",
        risk="polling takes a CPU; only direct I/O that asks for it gains",
        undo="connect again without poll queues",
    ),
)

_AHEAD = (
    Knob(
        "read_ahead_kb",
        Family.PREFETCH,
        "KiB",
        "how far buffered reads of a file in order are read ahead",
        Reach.NEW_OPENS,
        default="128, twice optimal_io_size where that is more",
        allowed="0 and more, rounded down to pages",
        ignored="direct I/O and files that are open take no notice; a rescan of a namespace sets "
        "it back on Linux 6.1, later kernels only ever raise it",
        risk="much is read for nothing where reads are scattered; 0 reads page by page",
    ),
)

_HEAD: dict[str, tuple[Reach | None, str]] = {
    "nr_requests": (Reach.READ_ONLY, "a write is refused: set it on the paths"),
    "scheduler": (Reach.READ_ONLY, "a write succeeds and does nothing: set it on the paths"),
    "rq_affinity": (Reach.READ_ONLY, "does nothing here: set it on the paths"),
    "wbt_lat_usec": (Reach.READ_ONLY, "cannot be read or set here: set it on the paths"),
    "max_sectors_kb": (None, "requests are cut by this first, then by that of the path"),
    "read_ahead_kb": (None, "this one counts; those of the paths are never used"),
}
"""What holds on the disk that native multipath shows, which has no queue of its own."""
_PATH: dict[str, tuple[Reach | None, str]] = {
    "max_sectors_kb": (None, "that of the multipath disk cuts first"),
    "read_ahead_kb": (Reach.READ_ONLY, "never used: set it on the multipath disk"),
}
_STACKED: dict[str, tuple[Reach | None, str]] = {
    "read_ahead_kb": (None, "this one counts; those of the disks below are not used"),
    "scheduler": (Reach.READ_ONLY, "set it on the disks below"),
}


def _read(subjects: Subjects) -> Iterator[Setting]:
    for disk in subjects.disks:
        folder = subjects.roots.sysfs / "block" / disk / "queue"
        known = _said_of(disk, subjects)
        for knob in KIND.knobs:
            source = folder / knob.name
            if not source.exists():
                continue
            reach, note = known.get(knob.name, (None, ""))
            value, allowed = _value(knob.name, source)
            if knob.name == "scheduler" and not allowed and reach is None:
                reach = Reach.READ_ONLY  # nothing to choose from: this disk has no queue
            yield setting(knob, disk, value, source, note, reach, allowed)


def _said_of(disk: str, subjects: Subjects) -> dict[str, tuple[Reach | None, str]]:
    """Where this disk is not like others."""
    sysfs = subjects.roots.sysfs
    special = {}
    if is_head(disk, sysfs):
        special = _HEAD
    elif head_of(disk):
        special = _PATH
    elif disk.startswith(("dm-", "md")):
        special = _STACKED
    if above := names_in(sysfs / "block" / disk / "holders"):
        note = f"not used: set it on {', '.join(above)} above"
        special = {**special, "read_ahead_kb": (Reach.READ_ONLY, note)}
    return special


def _value(name: str, source: Path) -> tuple[str | None, str]:
    """The value, and what it may be where the file says so."""
    text = read_text(source)
    if not text or not text.isprintable():
        return None, ""
    chosen = re.search(r"\[([^]]*)\]", text) if name == "scheduler" else None
    if chosen is None:
        return text, ""
    return chosen[1], text.replace("[", "").replace("]", "")


KIND = KnobKind("queue_sysfs", "the queue of a disk", (*_SIZES, *_DEPTHS, *_AHEAD), _read)
