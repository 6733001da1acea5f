"""Interval algebra on integer nanoseconds: exact, so that parts sum to their whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def clip(starts: Ints, ends: Ints, low: int, high: int) -> tuple[Ints, Ints]:
    """Cut half-open intervals to ``[low, high)`` and drop those with nothing left."""
    starts, ends = np.maximum(starts, low), np.minimum(ends, high)
    keep = starts < ends
    return starts[keep], ends[keep]


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Merge overlapping or touching intervals; the result is sorted and disjoint.

    Intervals of no length are left out.
    """
    real = starts < ends
    starts, ends = starts[real], ends[real]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.empty(len(starts), bool)
    first[0] = True
    first[1:] = starts[1:] > reach[:-1]
    heads = np.flatnonzero(first)
    return starts[heads], reach[np.append(heads[1:], len(starts)) - 1]


def intersection(starts: Ints, ends: Ints, others: Ints, other_ends: Ints) -> tuple[Ints, Ints]:
    """Where two sets of sorted, disjoint intervals meet."""
    starts, ends = np.concatenate([starts, others]), np.concatenate([ends, other_ends])
    low, high, _, together = step_function(starts, ends, np.ones(len(starts)))
    return low[together == 2], high[together == 2]


def length(starts: Ints, ends: Ints) -> int:
    """Total time covered by at least one interval."""
    merged_starts, merged_ends = union(starts, ends)
    return int((merged_ends - merged_starts).sum())


def covered(starts: Ints, ends: Ints, low: int, high: int) -> int:
    """Time inside ``[low, high)`` covered by at least one interval."""
    return length(*clip(starts, ends, low, high))


def covered_below(starts: Ints, ends: Ints, at: Ints) -> Ints:
    """Length of sorted, disjoint intervals below each of ``at``."""
    if not len(starts):
        return np.zeros(len(at), np.int64)
    before = np.concatenate([[0], np.cumsum(ends - starts)])
    place = np.searchsorted(starts, at, side="right")
    last = np.maximum(place - 1, 0)
    inside = np.maximum(np.minimum(at, ends[last]) - starts[last], 0)
    return np.where(place > 0, before[last] + inside, 0)


def split_by_priority(layers: list[tuple[Ints, Ints]], low: int, high: int) -> list[int]:
    """Give each instant of ``[low, high)`` to the first layer that covers it.

    Returns one length per layer and, last, the time no layer covers; they sum to ``high - low``.
    """
    starts, ends = np.empty(0, np.int64), np.empty(0, np.int64)
    lengths, before = [], 0
    for layer_starts, layer_ends in layers:
        starts = np.concatenate([starts, layer_starts])
        ends = np.concatenate([ends, layer_ends])
        starts, ends = union(*clip(starts, ends, low, high))
        total = int((ends - starts).sum())
        lengths.append(total - before)
        before = total
    return [*lengths, high - low - before]


def mean_depth(starts: Ints, ends: Ints) -> float | None:
    """Mean number of open intervals while at least one is open; None without any."""
    busy = length(starts, ends)
    return float(np.maximum(ends - starts, 0).sum()) / busy if busy > 0 else None


def step_function(
    starts: Ints, ends: Ints, weights: NDArray[np.float64]
) -> tuple[Ints, Ints, NDArray[np.float64], Ints]:
    """Count and weight of open intervals over time.

    Returns segment starts, segment ends, summed weight and number open in each segment, for
    segments of positive length in order.
    """
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)])
    change = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times = times[order]
    count = np.cumsum(steps[order])
    weight = np.cumsum(change[order])
    keep = np.flatnonzero(times[1:] > times[:-1])
    return times[keep], times[keep + 1], weight[keep], count[keep]
