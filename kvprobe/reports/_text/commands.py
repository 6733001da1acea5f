"""The commands of a device: its path, what happened on it, where their time went, its queues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from kvprobe import digest, units
from kvprobe.digest import label, number, pick, rows
from kvprobe.reports._text.page import Column, Page, paragraph, table
from kvprobe.sources.nvme import short_address


def path_lines(item: Any) -> Iterator[tuple[str, str]]:
    """An NVMe path and what happened on it; nothing for other devices."""
    path = pick(item, "path")
    if path is not None:
        yield "path", _path(path)
        yield "on the path", _events(pick(path, "events"))


def lines(item: Any) -> Iterator[tuple[str, str]]:
    """What is said of the commands of a device, where there is more than one queue or a path."""
    load = pick(item, "load")
    if load is not None and (pick(item, "path") is not None or len(rows(item, "queues")) > 1):
        yield from _load(load, of_a_path=pick(item, "path") is not None)
    segments = rows(item, "segments")
    if segments:
        n = units.count(max((number(s, "n") or 0 for s in segments), default=None))
        parts = [
            f"{digest.segment_name(s)} {units.share(number(s, 'share'))} "
            f"(median {units.duration(number(s, 'median_ns'))})"
            for s in segments
        ]
        yield "device time", f"{', '.join(parts)}; n={n}"
    for segment in segments:
        if why := label(segment, "why_merged"):
            yield "merged", f"{digest.segment_name(segment)}: {why}"
    if lost := number(item, "lost_share"):
        table_name = label(item, "counted_from") or units.UNKNOWN
        yield (
            "rows missing",
            f"{units.share(lost)} of the {table_name} rows were lost or thinned: counts and depths "
            "of commands are of the others",
        )


def _path(path: Any) -> str:
    words = [
        short_address(label(path, "address")),
        label(path, "state"),
        label(path, "ana_state"),
        f"iopolicy {policy}" if (policy := label(path, "iopolicy")) else None,
    ]
    queues, size = number(path, "io_queues"), number(path, "queue_size")
    if queues is not None or size is not None:
        noun = "I/O queue" if queues == 1 else "I/O queues"
        words.append(f"{units.count(queues)} {noun} of {units.count(size)}")
    names = pick(path, "names")
    if isinstance(names, list) and len(names) > 1:
        earlier = ", ".join(digest.printable(n) for n in names[:-1] if isinstance(n, str))
        words.append(f"reconnected: was {earlier}")
    return ", ".join(word for word in words if word) or units.UNKNOWN


def _events(events: Any) -> str:
    if events is None:
        return f"{units.UNKNOWN}: fabric events were not recorded"
    said = digest.path_events(events)
    return said or "no failover, retransmission, congestion, reconnect or timeout"


def _load(load: Any, *, of_a_path: bool) -> Iterator[tuple[str, str]]:
    rate, latency = number(load, "rate_per_s"), pick(load, "latency")
    part = f"{units.share(number(load, 'share'))} of the bytes of all paths, " if of_a_path else ""
    yield (
        "commands",
        f"{units.count(number(load, 'commands'))}, {part}"
        f"{units.UNKNOWN if rate is None else units.digits(rate)} a second",
    )
    yield (
        "in flight",
        f"mean {units.fixed(number(load, 'mean_depth'))}, "
        f"p99 {units.count(number(load, 'p99_depth'))}, "
        f"peak {units.count(number(load, 'peak_depth'))}",
    )
    shown = [
        f"{name} {units.duration(number(latency, key))}"
        for key, name in (("median_ns", "median"), ("p95_ns", "p95"), ("p99_ns", "p99"))
    ]
    yield "latency", f"{', '.join(shown)} (n={units.count(number(latency, 'n'))})"


def queue_table(item: Any, page: Page) -> Iterator[RenderableType]:
    """One line a queue, the busiest first; nothing where there is one queue and no path."""
    found = rows(item, "queues")
    if not found or (len(found) < 2 and pick(item, "path") is None):
        return
    busiest = sorted(found, key=lambda queue: number(queue, "bytes") or 0, reverse=True)
    shown = busiest[:MOST_QUEUES]
    yield table(page, _columns(), shown)
    if len(shown) < len(found):
        rest = busiest[MOST_QUEUES:]
        share = sum(number(queue, "share") or 0 for queue in rest)
        yield paragraph(f"{len(rest)} more queues carried {units.share(share)} of the bytes.")


MOST_QUEUES = 16
"""Lines of the table; a node may have a queue for each of 128 processors."""


def _columns() -> list[Column]:
    def latency(key: str) -> Any:
        return lambda row: units.duration(number(row, "latency", key))

    return [
        Column("queue", digest.queue_name, "left"),
        Column("commands", lambda row: units.count(number(row, "commands"))),
        Column("share", lambda row: units.share(number(row, "share"))),
        Column("a second", lambda row: units.count(_rounded(number(row, "rate_per_s"))),
               from_width=90),
        Column("depth", lambda row: units.fixed(number(row, "mean_depth"))),
        Column("p99", lambda row: units.count(number(row, "p99_depth"))),
        Column("peak/size", lambda row: f"{units.count(number(row, 'peak_depth'))}/"
               f"{units.count(number(row, 'queue_size')) if number(row, 'queue_size') else '?'}"),
        Column("median", latency("median_ns")),
        Column("p95", latency("p95_ns"), from_width=100),
        Column("p99", latency("p99_ns")),
        Column("idle", lambda row: units.share(number(row, "idle_while_waiting_share")),
               from_width=110),
    ]  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1) if value < 100 else round(value)
