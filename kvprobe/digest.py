"""What reports and screens read from the report document: safe access and plain totals.

A document is plain JSON (see ``kvprobe.document``); any leaf may be null. Nothing here estimates:
totals, counts, medians and percentiles of figures that the document states, each with the number
of requests that stand behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.model import Verdict
from kvprobe.units import known

Document = Mapping[str, Any]

SPANS = (
    ("engine_queue_ns", "engine queue", "waiting for the engine's scheduler"),
    ("lookup_ns", "lookup", "asking storage which chunks exist"),
    ("lookup_to_read_ns", "lookup to read", "chunks known, first read not yet issued"),
    ("restore_ns", "restore", "first read issued to last read done"),
    ("read_to_prefill_ns", "read to prefill", "data in memory, prefill not yet started"),
    ("prefill_ns", "prefill", "computing tokens that were not restored"),
    ("other_ns", "other", "explained by nothing that was traced"),
)
"""Spans of the time to first token in order of time: key, name, meaning."""

RESTORE_PARTS = (
    ("device_ns", "device", "the device or fabric was working on it"),
    ("block_queue_ns", "block queue", "waiting in the block layer"),
    ("software_ns", "software", "read call open, nothing outstanding below it"),
    ("idle_ns", "idle", "between reads: nothing was asked for"),
)
"""Parts of a restore: key, name, meaning."""

ATTRIBUTION = (
    ("exact", "the engine named the chunk keys"),
    ("thread", "one thread's run of reads after its lookups"),
    ("window", "only one request was waiting on storage"),
    ("shared", "several were waiting: split by bytes expected"),
    ("none", "could not be tied to a request"),
)
"""How bytes were tied to requests, best first."""

SEVERITIES = ("info", "warning", "critical")


def pick(node: Any, *path: str) -> Any:
    """The value at ``path`` in nested mappings, or None where any step is missing or null."""
    for name in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


def number(node: Any, *path: str) -> float | int | None:
    """Like ``pick``, for a finite number; anything else is None."""
    value = pick(node, *path)
    return value if known(value) else None


def label(node: Any, *path: str) -> str | None:
    """Like ``pick``, as one line of printable text; None where unknown or not a plain value.

    A capture may come from a stranger: control characters (terminal escapes, line breaks, text
    direction marks) never reach a terminal.
    """
    value = pick(node, *path)
    if value is None or isinstance(value, Mapping | list):
        return None
    return printable(str(value))


def printable(text: str) -> str:
    """The text with each character that a terminal would act upon replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def rows(node: Any, *path: str) -> list[Mapping[str, Any]]:
    """The mappings in the list at ``path``; empty where there is none."""
    value = pick(node, *path)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [row for row in value if isinstance(row, Mapping)]


def numbers(items: Iterable[Any], *path: str) -> list[float | int]:
    """The known figures at ``path`` of each item."""
    found = (number(item, *path) for item in items)
    return [value for value in found if value is not None]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all values do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Part:
    """One part of a total over requests. ``n`` requests had a known figure."""

    key: str
    name: str
    meaning: str
    total: float
    share: float | None
    median: float | None
    p90: float | None
    n: int


def parts(items: Sequence[Any], group: str, names: Sequence[tuple[str, str, str]]) -> list[Part]:
    """Totals, shares, medians and p90 of the figures of one group (``spans``, ``restore``)."""
    columns = [(name, numbers(items, group, name[0])) for name in names]
    whole = sum(sum(values) for _, values in columns)
    return [
        Part(
            *name,
            total=sum(values),
            share=sum(values) / whole if whole else None,
            median=quantile(values, 0.5),
            p90=quantile(values, 0.9),
            n=len(values),
        )
        for name, values in columns
    ]


def restored(document: Document) -> list[Mapping[str, Any]]:
    """The requests that read KV cache back from storage."""
    return [row for row in rows(document, "requests") if (number(row, "restore", "bytes") or 0) > 0]


def verdicts(document: Document) -> Counter[str]:
    """How many requests got which verdict; a null verdict counts as unknown."""
    return Counter(
        label(row, "verdict") or Verdict.UNKNOWN.value for row in rows(document, "requests")
    )


def undecided(row: Any) -> str:
    """A word for a request without a verdict.

    ``open`` where its gain may be of either sign, ``unknown`` where there is no estimate of it.
    """
    low, high = number(row, "gain_low_ns"), number(row, "gain_high_ns")
    return "open" if low is not None and high is not None and low <= 0 <= high else "unknown"


def undecided_restores(document: Document) -> Counter[str]:
    """How many requests that restored are ``open`` and how many ``unknown``."""
    return Counter(
        undecided(row)
        for row in restored(document)
        if label(row, "verdict") in (None, Verdict.UNKNOWN)
    )


def split_restores(document: Document) -> list[Mapping[str, Any]]:
    """The requests whose restore has every part: shares of a total are of these alone."""
    return [
        row
        for row in restored(document)
        if all(number(row, "restore", key) is not None for key, _, _ in RESTORE_PARTS)
    ]


def regret_ns(row: Any) -> float | None:
    """What the engine's choice cost this request beyond the other one; None unless it lost."""
    if label(row, "verdict") not in (Verdict.RESTORE_LOST, Verdict.RECOMPUTE_LOST):
        return None
    gain = number(row, "gain_ns")
    return None if gain is None else max(0.0, -gain)


def attribution_requests(document: Document) -> dict[str, int]:
    """How many requests have bytes of each attribution class."""
    items = rows(document, "requests")
    return {
        name: sum((number(row, "attribution", name) or 0) > 0 for row in items)
        for name, _ in ATTRIBUTION
    }


def mean_rate(document: Document, device: Any, way: str) -> float | None:
    """Bytes a second that a device moved over the window; ``way`` is ``read`` or ``write``."""
    count = number(device, f"{way}_bytes")
    span = number(document, "capture", "duration_ns")
    return None if count is None or not span or span <= 0 else count / span * 1e9


def attribution_class(row: Any) -> str | None:
    """The class that most of this request's bytes belong to; None where nothing is known."""
    shares = {name: number(row, "attribution", name) or 0 for name, _ in ATTRIBUTION}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] > 0 else None


SEGMENT_NAMES = {
    "driver": "driver queueing",
    "wire_and_target": "wire + target",
    "receive": "receive",
    "completion": "completion",
}
"""Segments of a command's time by their name in the document."""


PATH_EVENTS = (
    ("failovers", "failover", "failovers"),
    ("path_losses", "time lost", "times lost"),
    ("retransmits", "segment sent again", "segments sent again"),
    ("receive_gaps", "gap in what arrived", "gaps in what arrived"),
    ("congestion_events", "congestion event", "congestion events"),
    ("reconnects", "reconnect", "reconnects"),
    ("timeouts", "timeout", "timeouts"),
    ("send_waits", "wait for send space", "waits for send space"),
)
"""What happens on an NVMe path: key, name of one, name of several."""


def window(document: Document) -> tuple[float, float]:
    """From when to when the report is; from the devices' times where the capture does not say."""
    start, length = (number(document, "capture", key) for key in ("start_ns", "duration_ns"))
    if start is not None and length is not None and length > 0:
        return start, start + length
    points = [p for device in rows(document, "devices") for p in rows(device, "timeline")]
    return min(numbers(points, "start_ns"), default=0), max(numbers(points, "end_ns"), default=0)


def path_events(events: Any) -> str:
    """What happened on a path in words; empty where nothing did."""
    said = []
    for key, one, several in PATH_EVENTS:
        count = number(events, key)
        if count != 0:
            said.append(
                f"{'?' if count is None else f'{count:,.0f}'} {one if count == 1 else several}"
            )
    return ", ".join(said)


def segment_name(segment: Any) -> str:
    """A segment in words; merged ones in brackets."""
    parts = segment.get("parts") if isinstance(segment, Mapping) else None
    found = [
        part if isinstance(part, str) else "?"
        for part in (parts if isinstance(parts, list) else ())
    ]
    words = [SEGMENT_NAMES.get(part, printable(part)) for part in found]
    return f"[{' + '.join(words)}]" if len(words) > 1 else "".join(words) or "unknown"


def queue_name(queue: Any) -> str:
    """A queue pair of a controller, or a hardware queue of the block layer."""
    controller, index = label(queue, "controller"), label(queue, "queue") or "?"
    return f"hw {index}" if controller is None else f"nvme{controller} q{index}"


def losses(document: Document) -> list[tuple[str, int, int, int]]:
    """Tables that are not whole, as ``(table, rows, lost, thinned)``."""
    tables = pick(document, "losses")
    found = []
    for name in tables if isinstance(tables, Mapping) else ():
        got, lost, thinned = (
            int(number(tables, name, key) or 0) for key in ("rows", "lost", "thinned")
        )
        if lost or thinned:
            found.append((name, got, lost, thinned))
    return found


def worst_severity(document: Document) -> int:
    """Index in ``SEVERITIES`` of the gravest finding, -1 where there is none."""
    return max((severity_rank(row) for row in rows(document, "findings")), default=-1)


def severity_rank(finding: Any) -> int:
    """Index of a finding's severity in ``SEVERITIES``; an unknown one ranks as ``info``."""
    name = label(finding, "severity")
    return SEVERITIES.index(name) if name in SEVERITIES else 0
