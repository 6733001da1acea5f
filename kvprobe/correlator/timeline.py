"""A device second by second, from the in-kernel sums: complete even where rows were thinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.model import Frame

POINTS = 60
"""Points of a timeline; more intervals than that are merged, neighbours first."""
WHOLE = 0.99
"""Share of the counted reads with rows from which the slowest row is taken for the slowest read."""
_READ, _WRITE = 0, 1
_SECOND_NS = 1e9

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TimelinePoint:
    """One stretch of time. ``depth_mean`` is of reads, as a device's depth figures are.

    ``read_p50_ns`` and ``read_p99_ns`` are interpolated within a histogram bucket; None without
    ``reads``.
    """

    start_ns: int
    end_ns: int
    depth_mean: float | None
    read_bytes_per_s: float
    write_bytes_per_s: float
    reads: int
    read_p50_ns: float | None
    read_p99_ns: float | None


def timeline(
    depth: Frame,
    histogram: Frame,
    devices: Sequence[int],
    points: int = POINTS,
    block: Frame | None = None,
) -> tuple[TimelinePoint, ...]:
    """The device over the window, oldest first.

    Args:
        depth: the ``depth`` table.
        histogram: the ``histogram`` table.
        devices: every dev_t that the device had.
        points: how many at most.
        block: all requests of the window, where none is missing: quantiles never exceed the
            slowest read of their stretch of time.
    """
    depth, histogram = _of(depth, devices), _of(histogram, devices)
    reads = None if block is None else _reads(_of(block, devices))
    counted = int(histogram["requests"][histogram["direction"] == _READ].sum())
    if reads is not None and len(reads[0]) < WHOLE * counted:
        reads = None  # a filter left rows out, the slowest perhaps
    ends = np.unique(np.concatenate([depth["end_ns"], histogram["end_ns"]]))
    if not len(ends):
        return ()
    # Merge runs of intervals, so that there are at most `points` of them.
    groups = np.arange(len(ends)) * min(points, len(ends)) // len(ends)
    depth_group = groups[np.searchsorted(ends, depth["end_ns"])]
    counted_group = groups[np.searchsorted(ends, histogram["end_ns"])]
    found = []
    for group in range(int(groups[-1]) + 1):
        found.append(
            _point(
                select(depth, depth_group == group),
                select(histogram, counted_group == group),
                reads,
            )
        )
    return tuple(found)


def _of(frame: Frame, devices: Sequence[int]) -> Frame:
    return select(frame, np.isin(frame["device"], list(devices)))


def _reads(block: Frame) -> tuple[Ints, Ints]:
    """When each read was done, ascending, and how long it took."""
    known = (block["op"] == _READ) & (block["queued_ns"] >= 0)
    done, took = block["done_ns"][known], (block["done_ns"] - block["queued_ns"])[known]
    order = np.argsort(done, kind="stable")
    return done[order], took[order]


def _point(depth: Frame, counted: Frame, timed: tuple[Ints, Ints] | None) -> TimelinePoint:
    start = int(min(f["start_ns"].min() for f in (depth, counted) if len(f["start_ns"])))
    end = int(max(f["end_ns"].max() for f in (depth, counted) if len(f["end_ns"])))
    span = max(1, end - start)
    reads = select(counted, counted["direction"] == _READ)
    written = counted["bytes"][counted["direction"] == _WRITE]
    return TimelinePoint(
        start_ns=start,
        end_ns=end,
        depth_mean=_mean_depth(depth),
        read_bytes_per_s=float(reads["bytes"].sum() / span * _SECOND_NS),
        write_bytes_per_s=float(written.sum() / span * _SECOND_NS),
        reads=int(reads["requests"].sum()),
        read_p50_ns=_capped(_quantile(reads, 0.5), timed, start, end),
        read_p99_ns=_capped(_quantile(reads, 0.99), timed, start, end),
    )


def _mean_depth(depth: Frame) -> float | None:
    """Time-weighted mean of reads."""
    rows = depth["direction"] == _READ
    time = int(depth["time_ns"][rows].sum())
    work = int((depth["depth"][rows] * depth["time_ns"][rows]).sum())
    return work / time if time > 0 else None


def _capped(
    value: float | None, timed: tuple[Ints, Ints] | None, start: int, end: int
) -> float | None:
    """Not above the slowest read that was done from ``start`` to ``end``.

    It lies somewhere in the bucket within which a quantile is interpolated.
    """
    if value is None or timed is None:
        return value
    done, took = timed
    here = took[np.searchsorted(done, start) : np.searchsorted(done, end, side="right")]
    return min(value, float(here.max())) if len(here) else value


def _quantile(counted: Frame, share: float) -> float | None:
    """The latency that ``share`` of the requests stay below, linear within its bucket."""
    low: Ints = counted["latency_low_ns"]
    order = np.argsort(low, kind="stable")
    running = np.cumsum(counted["requests"][order])
    if not len(running) or running[-1] <= 0:
        return None
    wanted = share * running[-1]
    at = int(np.searchsorted(running, wanted, side="left"))
    row = order[at]
    before = running[at - 1] if at else 0
    inside = (wanted - before) / counted["requests"][row]
    bottom, top = int(low[row]), int(counted["latency_high_ns"][row])
    return float(bottom + inside * (top - bottom))
