"""Divide hits that one thread asked for in a row among the prompts they belong to.

Prompts that are stored whole leave no miss between them, and a busy machine makes pauses within
one. What tells is the engine's own count of restored tokens: requests are looked up in order of
arrival, each for as many files as it restored. The division with the least cost is found by
dynamic programming over (hits used up, last request).
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.waiting import Told as _Told
from kvprobe.correlator.waiting import Waiting

Flags = NDArray[np.bool_]

# Costs. A prompt that no request explains costs more than any way to explain it, and the more the
# longer it is; a cut costs less where something marks it.
UNEXPLAINED, UNEXPLAINED_EACH = 4.0, 0.2
NEARLY, NEARLY_SHARE = 0.5, 0.1
"""Off by a few lost lookups."""
COMPUTED = 3.0
"""Explained by a request that restored nothing: it may have found any number."""
CUT_ANYWHERE, CUT_AT_PAUSE, CUT_AT_HEAD = 0.2, 0.1, 0.0
HEAD_INSIDE = 3.0
SKIPPED = 1.5
"""A request that arrived in between and asked at another time."""
SKIPS = 4
MARKS = 12
"""Requests and marks looked at ahead of a place."""
AHEAD = 64
"""A way that costs a whole unexplained part more than one that is up to so many hits further on
is given up."""


@dataclass(frozen=True)
class Hits:
    """Hits in a row: when each was asked, where a pause precedes and which keys begin prompts.

    A part that begins at a hit ends at its ``limits`` at the latest: there a key comes again.
    """

    starts: list[int]
    ends: list[int]
    pause: Flags
    head: Flags
    limits: list[int]


def divide(hits: Hits, waiting: Waiting, lossy: bool) -> list[int]:
    """Lengths of the parts; they sum to the number of hits. ``lossy``: lookups were lost."""
    n = len(hits.starts)
    marks = np.flatnonzero(hits.pause | hits.head).tolist()
    if not waiting.unit_tokens:
        return _lengths(_within_limits([0, *marks, n], hits.limits))
    search = _Search(hits, [*marks, n], waiting, lossy)
    cheapest: dict[_State, float] = {(0, -1): 0.0}
    came_from: dict[_State, _State] = {}
    queue = [(0, 0.0, -1)]
    reached = [np.inf] * (n + 1)
    while queue[0][0] < n:
        used, cost, last = heapq.heappop(queue)
        hopeless = cost > min(reached[used : used + AHEAD]) + UNEXPLAINED
        if hopeless or cost > cheapest[used, last]:
            continue
        for stop, request, price in search.parts(used, last):
            if cost + price < cheapest.get((stop, request), np.inf):
                cheapest[stop, request] = cost + price
                came_from[stop, request] = (used, last)
                reached[stop] = min(reached[stop], cost + price)
                heapq.heappush(queue, (stop, cost + price, request))
    edges, state = [n], (n, queue[0][2])
    while state in came_from:
        state = came_from[state]
        edges.append(state[0])
    return _lengths(edges[::-1])


def _within_limits(edges: list[int], limits: list[int]) -> list[int]:
    within = []
    for first, last in itertools.pairwise(edges):
        while first < last:
            within.append(first)
            first = min(limits[first], last)
    return [*within, edges[-1]]


def _lengths(edges: list[int]) -> list[int]:
    return [last - first for first, last in itertools.pairwise(edges) if first < last]


_State = tuple[int, int]
"""Hits used up and the place of the last request that explained some (-1: none yet)."""


class _Search:
    """What may come next after some hits were used up, and what it costs."""

    def __init__(self, hits: Hits, marks: list[int], waiting: Waiting, lossy: bool) -> None:
        self._hits, self._marks, self._waiting, self._lossy = hits, marks, waiting, lossy
        self._n = len(hits.starts)
        self._heads = np.concatenate([[0], np.cumsum(hits.head)]).tolist()
        self._cut = np.where(
            hits.head, CUT_AT_HEAD, np.where(hits.pause, CUT_AT_PAUSE, CUT_ANYWHERE)
        ).tolist()
        self._near: dict[int, list[_Told]] = {}

    def parts(self, used: int, last: int) -> Iterator[tuple[int, int, float]]:
        """Next parts: where each ends, who explains it, its cost."""
        near, limit = self._waiting_at(used), self._hits.limits[used]
        ahead = [told for told in near if told.place > last and told.units > 0]
        for skipped, told in enumerate(ahead if last < 0 else ahead[: SKIPS + 1]):
            price = SKIPPED * skipped if last >= 0 else 0.0
            for stop in {used + told.units, used + told.units + told.more}:
                if stop <= limit and self._hits.ends[stop - 1] <= told.deadline:
                    yield stop, told.place, price + self._edges(used, stop)
        first = bisect_right(self._marks, used)
        for stop in {*self._marks[first : first + MARKS], limit}:
            if stop > limit:
                continue
            price = self._unexplained(near, stop - used, self._hits.ends[stop - 1])
            yield stop, last, price + self._edges(used, stop)

    def _waiting_at(self, used: int) -> list[_Told]:
        if used not in self._near:
            self._near[used] = self._waiting.told(self._hits.starts[used])
        return self._near[used]

    def _edges(self, used: int, stop: int) -> float:
        """Cost of the cut at ``stop`` and of the heads that the part has inside."""
        inside = HEAD_INSIDE * (self._heads[stop] - self._heads[used + 1])
        return float(inside + (self._cut[stop] if stop < self._n else 0.0))

    def _unexplained(self, near: list[_Told], length: int, end: int) -> float:
        price = UNEXPLAINED + UNEXPLAINED_EACH * length
        for told in near:
            if told.deadline < end:
                continue
            if told.units <= 0:
                price = min(price, COMPUTED)
            elif self._lossy and 0 < told.units - length <= max(1, NEARLY_SHARE * told.units):
                price = min(price, NEARLY)
        return price
