"""Interval algebra against a bitmap: one flag per nanosecond of a small window."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvprobe.correlator import intervals

SIZE = 41
edge = st.integers(-7, SIZE + 6)
spans = st.lists(st.tuples(edge, edge), max_size=9)
window = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def arrays(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Starts and ends; some of the intervals are empty or end before they start."""
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def bitmap(pairs: list[tuple[int, int]], low: int = -7, high: int = SIZE + 7) -> Flags:
    flags = np.zeros(SIZE + 14, bool)
    for start, end in pairs:
        for t in range(max(start, low), min(end, high)):
            flags[t + 7] = True
    return flags


@given(spans)
def test_union_covers_the_same_instants_and_is_sorted_and_disjoint(
    pairs: list[tuple[int, int]],
) -> None:
    starts, ends = intervals.union(*arrays(pairs))
    merged = list(zip(starts.tolist(), ends.tolist(), strict=True))
    assert (bitmap(merged) == bitmap(pairs)).all()
    assert all(a < b for a, b in merged)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert intervals.length(*arrays(pairs)) == bitmap(pairs).sum()


def test_touching_intervals_are_one() -> None:
    starts, ends = intervals.union(*arrays([(5, 9), (0, 5), (11, 13), (12, 12)]))
    assert (starts.tolist(), ends.tolist()) == ([0, 11], [9, 13])


@given(spans, window)
def test_clip_and_covered(pairs: list[tuple[int, int]], cut: list[int]) -> None:
    low, high = cut
    starts, ends = intervals.clip(*arrays(pairs), low, high)
    clipped = list(zip(starts.tolist(), ends.tolist(), strict=True))
    assert all(low <= a < b <= high for a, b in clipped)
    assert (bitmap(clipped) == bitmap(pairs, low, high)).all()
    assert intervals.covered(*arrays(pairs), low, high) == bitmap(pairs, low, high).sum()


@given(st.lists(spans, max_size=4), window)
def test_each_instant_goes_to_the_first_layer_that_covers_it(
    layers: list[list[tuple[int, int]]], cut: list[int]
) -> None:
    low, high = cut
    owner = np.full(high - low, len(layers))
    for layer in reversed(range(len(layers))):
        owner[bitmap(layers[layer])[low + 7 : high + 7]] = layer
    expected = [int((owner == layer).sum()) for layer in range(len(layers) + 1)]
    lengths = intervals.split_by_priority([arrays(layer) for layer in layers], low, high)
    assert lengths == expected
    assert sum(lengths) == high - low


@given(st.lists(st.tuples(edge, st.integers(0, 13), st.integers(1, 5)), max_size=9))
def test_step_function_counts_and_weighs_what_is_open(rows: list[tuple[int, int, int]]) -> None:
    starts = np.array([s for s, _, _ in rows], np.int64)
    ends = np.array([s + d for s, d, _ in rows], np.int64)
    low, high, weight, count = intervals.step_function(
        starts, ends, np.array([w for *_, w in rows], float)
    )
    assert (low < high).all()
    assert (high[:-1] == low[1:]).all()
    for a, b, w, n in zip(low, high, weight, count, strict=True):
        for t in range(a, b):
            is_open = [row for row in rows if row[0] <= t < row[0] + row[1]]
            assert n == len(is_open)
            assert w == sum(row[2] for row in is_open)
    if rows and (starts < ends).any():
        assert (low[0], high[-1]) == (starts.min(), ends.max())


@given(spans)
def test_mean_depth_is_open_time_over_busy_time(pairs: list[tuple[int, int]]) -> None:
    busy = int(bitmap(pairs).sum())
    total = sum(max(b - a, 0) for a, b in pairs)
    depth = intervals.mean_depth(*arrays(pairs))
    assert depth is None if busy == 0 else depth == total / busy
