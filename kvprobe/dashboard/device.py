"""The text of a device's page: its path, where its commands' time goes, its queues. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.dashboard.details import pairs
from kvprobe.digest import label, number, pick, rows
from kvprobe.sources.nvme import short_address

SEGMENT_STYLES = ("#8787af", "#5fafff", "#ffaf5f", "#87d75f")
"""Colours of the segments of a command, in order."""


def device_title(item: Any, width: int) -> Text:
    """One line for the list: name, head, load."""
    name, head = label(item, "name") or "?", label(item, "head")
    line = Text.assemble((name, "bold cyan"))
    if head and head != name:
        line.append(f"  path to {head}", "none")
    share = number(item, "load", "share")
    if share is not None and head:
        line.append(f"  {units.share(share)} of the load", "none")
    rate = number(item, "load", "rate_per_s")
    if rate is not None:
        line.append(f"  {_rate(rate)} commands/s", "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def device_text(item: Any, width: int) -> RenderableType:
    """Everything about one device that is not on the panel."""
    return Group(
        pairs([*_path(item), *_load(item)]),
        Text(""),
        *_queues(item, width),
        *_segments(item, width),
    )


def _path(item: Any) -> Iterator[tuple[str, str | Text]]:
    path = pick(item, "path")
    if path is None:
        return
    words: list[str | None] = [short_address(label(path, "address"))]
    words += [label(path, key) for key in ("state", "ana_state")]
    policy = label(path, "iopolicy")
    words.append(f"iopolicy {policy}" if policy else None)
    yield "path", ", ".join(word for word in words if word) or units.UNKNOWN
    events = pick(path, "events")
    if events is None:
        yield "on the path", Text("fabric events are not recorded", "dim")
        return
    text = digest.path_events(events)
    yield "on the path", Text(text, "yellow") if text else Text("nothing happened", "dim")


def _load(item: Any) -> Iterator[tuple[str, str | Text]]:
    load = pick(item, "load")
    size, rate = number(load, "bytes"), number(load, "rate_per_s")
    yield (
        "commands",
        f"{units.count(number(load, 'commands'))}, {units.size(size)}, {_rate(rate)} a second",
    )
    yield (
        "in flight",
        f"mean {units.fixed(number(load, 'mean_depth'))}, "
        f"p99 {units.count(number(load, 'p99_depth'))}, "
        f"peak {units.count(number(load, 'peak_depth'))}",
    )
    yield "latency", _latency(pick(load, "latency"))
    if lost := number(item, "lost_share"):
        yield "rows missing", Text(f"{units.share(lost)}: figures are of the others", "bold red")


def _latency(latency: Any) -> str:
    known = [
        f"{name} {units.duration(number(latency, key))}"
        for key, name in (("median_ns", "median"), ("p95_ns", "p95"), ("p99_ns", "p99"))
    ]
    return f"{', '.join(known)} (n={units.count(number(latency, 'n'))})"


def _segments(item: Any, width: int) -> Iterator[RenderableType]:
    """A bar of the segments and what each of them is."""
    segments = rows(item, "segments")
    if not segments:
        return
    yield Text("\nWhere a command's time goes", "bold")
    shares = [number(segment, "share") for segment in segments]
    bar = zip(bars.stacked(shares, max(10, width - 1)), SEGMENT_STYLES, strict=False)
    yield Text.assemble(*bar)
    for index, segment in enumerate(segments):
        middle, p95 = (units.duration(number(segment, key)) for key in ("median_ns", "p95_ns"))
        line = Text.assemble(
            (bars.SHADES[index % len(bars.SHADES)], SEGMENT_STYLES[index % len(SEGMENT_STYLES)]),
            f" {digest.segment_name(segment)} {units.share(shares[index])}",
            (f"  median {middle}, p95 {p95}", "dim"),
        )
        if why := label(segment, "why_merged"):
            line.append(f"  one segment: {why}", "dim")
        yield line


_ROOMY = 84
"""Width from which the table has all of its columns."""
_COLUMNS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("commands", lambda row: units.count(number(row, "commands"))),
    ("/s", lambda row: _rate(number(row, "rate_per_s"))),
    ("share", lambda row: units.share(number(row, "share"))),
    ("depth", lambda row: units.fixed(number(row, "mean_depth"))),
    ("p99 depth", lambda row: units.count(number(row, "p99_depth"))),
    ("peak", lambda row: units.count(number(row, "peak_depth"))),
    ("size", lambda row: units.count(number(row, "queue_size"))),
    ("latency", lambda row: units.duration(number(row, "latency", "median_ns"))),
    ("p99", lambda row: units.duration(number(row, "latency", "p99_ns"))),
)


_FOR_ROOM = ("commands", "p99 depth")


def _queues(item: Any, width: int) -> Iterator[RenderableType]:
    found = rows(item, "queues")
    yield Text("Queues", "bold")
    if not found:
        yield Text("the queue of its commands is not known", "dim")
        return
    roomy = width >= _ROOMY
    columns = [each for each in _COLUMNS if roomy or each[0] not in _FOR_ROOM]
    table = Table(box=None, padding=(0, 2 if roomy else 1, 0, 0), header_style="dim")
    table.add_column("queue", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in found:
        cells = [show(row) for _, show in columns]
        table.add_row(digest.queue_name(row), *("?" if c == units.UNKNOWN else c for c in cells))
    yield table


def _rate(value: float | int | None) -> str:
    return units.UNKNOWN if value is None else units.digits(value)
