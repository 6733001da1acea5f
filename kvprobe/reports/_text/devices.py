"""The devices: how deep their queues were, how fast they answered, what they can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from kvprobe import bars, digest, units
from kvprobe.digest import Document, label, number, pick, rows
from kvprobe.reports._text import commands
from kvprobe.reports._text.page import Column, Page, heading, labelled, paragraph, table


def devices(document: Document, page: Page) -> Iterator[RenderableType]:
    """One block a device."""
    items = rows(document, "devices")
    if not items:
        yield heading("Devices")
        yield paragraph("No block device was seen.")
    for item in items:
        transport, head = label(item, "transport"), label(item, "head")
        name = label(item, "name") or units.UNKNOWN
        note = f"transport {transport or units.UNKNOWN}"
        yield heading(
            f"Device {name}", f"path to {head}, {note}" if head and head != name else note
        )
        yield labelled(
            [*commands.path_lines(item), *_lines(document, item, page), *commands.lines(item)]
        )
        yield from commands.queue_table(item, page)
        surface = [row for row in rows(item, "surface") if _is_shown(row)]
        if surface:
            yield table(page, _surface_columns(), surface)


def _lines(document: Document, item: Any, page: Page) -> Iterator[tuple[str, str]]:
    for way in ("read", "write"):
        count, size = number(item, f"{way}s"), number(item, f"{way}_bytes")
        rate = digest.mean_rate(document, item, way)
        if count is not None:
            text = f"{units.count(count)} requests, {units.size(size)}"
            yield f"{way}s", text + (f", {units.rate(rate)} on average" if rate is not None else "")
    depth = pick(item, "depth")
    yield (
        "read depth",
        f"mean {units.fixed(number(depth, 'mean'))}, p99 {units.count(number(depth, 'p99'))}, "
        f"no read queued {units.share(number(depth, 'time_at_zero_share'))} of the time",
    )
    latency = pick(item, "read_latency")
    if number(latency, "median_ns") is not None:
        low, mid, high = (
            units.duration(number(latency, key)) for key in ("p5_ns", "median_ns", "p95_ns")
        )
        n = units.count(number(latency, "n"))
        yield "read latency", f"p5 {low}, median {mid}, p95 {high} (n={n})"
    yield from _courses(document, item, page)
    yield "Little's law", _little(pick(item, "little_check"))


_BESIDE_COURSE = 44
"""Cells of a course's line that are not the course itself."""
_COURSES = (
    ("read rate", "read_bytes_per_s", units.rate),
    ("depth", "depth_mean", units.fixed),
    ("read p99", "read_p99_ns", units.duration),
)


def _courses(document: Document, item: Any, page: Page) -> Iterator[tuple[str, str]]:
    """How it went over the window, from nothing to the highest value; one axis for all devices."""
    points = rows(item, "timeline")
    if len(points) < 3:
        return
    low, high = digest.window(document)
    most = max(len(rows(device, "timeline")) for device in rows(document, "devices"))
    width = min(most, page.width - _BESIDE_COURSE)
    for name, key, show in _COURSES:
        values = [number(point, key) for point in points]
        highest = max((value for value in values if value is not None), default=None)
        if highest is not None:
            spans = [(number(p, "start_ns"), number(p, "end_ns")) for p in points]
            line = bars.sparkline(bars.on_axis(spans, values, low, high, width), width)
            yield f"{name} in time", f"{line} highest {show(highest)}"


def _little(check: Any) -> str:
    ratio = number(check, "ratio")
    if ratio is None:
        return "not checked: no request has a row, or rows are missing (see losses)"
    n = units.count(number(check, "n"))
    text = f"rate x latency / measured depth = {units.fixed(ratio, 3)} (n={n})"
    if ratio < 0.9:
        return f"{text}: some I/O of this device has no row here"
    return text if ratio <= 1.1 else f"{text}: the depth counters missed some I/O"


def _is_shown(cell: Any) -> bool:
    """A capture has a cell for each depth it saw: the powers of two say as much."""
    depth = number(cell, "depth")
    return depth is None or depth < 1 or math.log2(depth).is_integer()


def _surface_columns() -> list[Column]:
    return [
        Column("request size", lambda row: units.size(number(row, "size_bytes"))),
        Column("depth", lambda row: units.count(number(row, "depth"))),
        Column("device rate", lambda row: units.interval(
            number(row, "bytes_per_s"), number(row, "low_bytes_per_s"),
            number(row, "high_bytes_per_s"), units.rate)),
        Column("n", lambda row: units.count(number(row, "n"))),
        Column("measured in", lambda row: label(row, "source") or units.UNKNOWN, "left"),
        Column("way", lambda row: {True: "direct", False: "buffered"}.get(
            pick(row, "direct"), units.UNKNOWN), "left"),
    ]  # fmt: skip
