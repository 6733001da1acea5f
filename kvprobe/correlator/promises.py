"""What requests were told is stored: bursts of lookups, matched to the requests that asked.

An engine tests a prompt's chunks one after another before it restores any; the answers are the
request's hit map. A burst is matched to a request by what the engine tells of both: it lies
between arrival and prefill, and its hits are the request's storage hits. Where the engine names
the chunk keys itself, its word replaces the match.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from kvprobe.correlator.bursts import Promise, bursts, mend, split
from kvprobe.correlator.identify import KVFiles
from kvprobe.model import Frame

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NEVER = np.iinfo(np.int64).max
_UNMATCHED = 1e6
_REPEATED = 3.0
"""Cost of leaving a burst unmatched that was asked before: above any good match, below a misfit."""
_COMPUTED = 10.0
"""Cost of hits that the engine was told of but did not restore."""
_MISFIT = 1e3


def asked(
    lookups: Frame, files: KVFiles, requests: Frame, unit_tokens: int | None
) -> list[Promise]:
    """Bursts of the window with the request each belongs to, -1 where none fits.

    A burst fits a request when it lies between arrival and the start of prefill (or the first
    token). Each request gets at most one at least total cost: how far its hits are from the
    tokens the engine says came from storage, then how long after arrival it began, as engines
    look up in order of arrival. Bursts of an engine that asks again each step join the first.
    """
    waiting = _Waiting(requests, unit_tokens)
    found = bursts(lookups, files, len(waiting.order))
    found = mend(found, waiting.explain)
    found = [part for burst in found for part in _divide(burst, waiting, lookups)]
    fits = [waiting.fitting(burst) for burst in found]
    _match(found, fits, len(requests["arrival_ns"]))
    _join_repeats(found, fits)
    return found


class _Waiting:
    """Which requests could have asked at a time, and how well a burst fits them."""

    def __init__(self, requests: Frame, unit_tokens: int | None) -> None:
        deadline = np.where(
            requests["prefill_start_ns"] >= 0,
            requests["prefill_start_ns"],
            requests["first_token_ns"],
        )
        self.arrival = requests["arrival_ns"]
        self.deadline = np.where(deadline >= 0, deadline, _NEVER)
        self.hits, self.device = requests["storage_hit_tokens"], requests["device_hit_tokens"]
        self.prompt, self.unit = requests["prompt_tokens"], unit_tokens
        order = np.argsort(self.arrival, kind="stable")
        self.order = order[self.arrival[order] >= 0]
        self._arrived = self.arrival[self.order]
        self._longest = np.maximum.accumulate(self.deadline[self.order])
        told = (self.deadline < _NEVER) & (self.arrival >= 0)
        self._scale = max(int((self.deadline - self.arrival)[told].max(initial=1)), 1)

    def places(self, begin: int, end: int | None = None) -> Ints:
        """Places in ``order`` of the requests that waited at ``begin`` (until ``end``)."""
        end = begin if end is None else end
        stop = int(np.searchsorted(self._arrived, begin, side="right"))
        start = min(int(np.searchsorted(self._longest, end)), stop)
        return start + np.flatnonzero(self.deadline[self.order[start:stop]] >= end)

    def in_turn(self, place: int, starts: list[int], ends: list[int]) -> list[int] | None:
        """Units of successive arrivals from ``place`` on that fill these hits exactly, or None."""
        lengths, filled = [], 0
        while filled < len(starts):
            if place >= len(self.order):
                return None
            request = self.order[place]
            units = int(self.hits[request]) // (self.unit or 1)
            last = filled + units - 1
            if units > 0:
                late = last >= len(ends) or ends[last] > self.deadline[request]
                if late or starts[filled] < self.arrival[request]:
                    return None
                lengths.append(units)
                filled += units
            place += 1
        return lengths

    def fitting(self, burst: Promise) -> tuple[Ints, Floats]:
        """Requests that may have made this burst, and the cost of each."""
        near = self.order[self.places(burst.start_ns, burst.end_ns)]
        # Convex, so that of two bursts the earlier goes to the earlier arrival.
        waited = (burst.start_ns - self.arrival[near]) / self._scale
        cost = 1 + np.minimum(waited, 1.0) ** 2
        if not self.unit:
            return near, cost
        off = self._off(near, len(burst.hits))
        misfit = _MISFIT * np.minimum(off / self.unit, 100)
        # None was restored: it may have computed what it found.
        misfit = np.where(self.hits[near] == 0, np.where(off > 0, _COMPUTED, 0), misfit)
        cost = cost + np.where(self.hits[near] >= 0, misfit, 0)
        least = (len(burst.hits) + len(burst.misses) - 1) * self.unit
        possible = (self.prompt[near] < 0) | (least < self.prompt[near])
        return near[possible], cost[possible]

    def explain(self, burst: Promise) -> bool:
        """Whether some request was told of just as many hits."""
        near = self.order[self.places(burst.start_ns, burst.end_ns)]
        return bool(((self.hits[near] > 0) & (self._off(near, len(burst.hits)) == 0)).any())

    def _off(self, near: Ints, found: int) -> Ints:
        """Tokens between ``found`` hits and what each request was told."""
        tokens, told = found * (self.unit or 0), self.hits[near]
        # An engine may also test the chunks that its device memory holds.
        most = told + np.maximum(self.device[near], 0)
        off: Ints = np.maximum(told - tokens, 0) + np.maximum(tokens - most, 0)
        return off


def _divide(burst: Promise, waiting: _Waiting, lookups: Frame) -> list[Promise]:
    """Cut a burst that no waiting request explains, but several one after another do.

    Prompts that are stored whole leave no miss between them; the hits the engine tells do.
    """
    if not waiting.unit or len(burst.hits) < 2 or waiting.explain(burst):
        return [burst]
    rows = burst.rows[: len(burst.hits)]
    starts, ends = lookups["start_ns"][rows].tolist(), lookups["end_ns"][rows].tolist()
    ways = [waiting.in_turn(i, starts, ends) for i in waiting.places(burst.start_ns)]
    shortest = min(filter(None, ways), key=len, default=[])
    return split(burst, shortest, lookups) if len(shortest) > 1 else [burst]


def _match(found: list[Promise], fits: list[tuple[Ints, Floats]], requests: int) -> None:
    """At most one request a burst and one burst a request, at least total cost."""
    if not found or not any(len(near) for near, _ in fits):
        return
    rows = np.repeat(np.arange(len(found)), [len(near) for near, _ in fits])
    # A private dummy request for each burst makes a full matching always possible.
    own = np.arange(len(found))
    alone = np.where(_asked_before(found), _REPEATED, _UNMATCHED)
    graph = coo_array(
        (
            np.concatenate([*(cost for _, cost in fits), alone]),
            (np.concatenate([rows, own]), np.concatenate([*(n for n, _ in fits), requests + own])),
        ),
        shape=(len(found), requests + len(found)),
    ).tocsr()
    burst, request = min_weight_full_bipartite_matching(graph)
    for b, r in zip(burst.tolist(), request.tolist(), strict=True):
        if r < requests:
            found[b].request = r


def _asked_before(found: list[Promise]) -> NDArray[np.bool_]:
    """Bursts of the very keys of an earlier one: an engine asks again, or prompts are equal."""
    seen: set[tuple[int, ...]] = set()
    again = np.zeros(len(found), bool)
    for b, promise in enumerate(found):
        keys = (*promise.hits, *promise.misses)
        again[b] = keys in seen
        seen.add(keys)
    return again


def _join_repeats(found: list[Promise], fits: list[tuple[Ints, Floats]]) -> None:
    """Unmatched bursts of the same keys, or of more of them by now, join a matched one."""
    matched = {p.request: p for p in found if p.request >= 0}
    for promise, (near, _) in zip(found, fits, strict=True):
        if promise.request >= 0:
            continue
        keys = {*promise.hits, *promise.misses}
        for r in near.tolist():
            other = matched.get(r)
            if other is not None and _same(keys, {*other.hits, *other.misses}):
                promise.request = r
                break


def _same(some: set[int], others: set[int]) -> bool:
    return some <= others or others <= some


def named_by_engine(
    keys: Frame, requests: Frame, files: KVFiles, unit_tokens: int | None
) -> list[Promise]:
    """Promises from the ``keys`` table: the engine itself says what a prompt consists of."""
    number = {key: i for i, key in enumerate(files.keys)}
    index: dict[str, list[int]] = {}
    for i, name in enumerate(requests["id"]):
        index.setdefault(name, []).append(i)  # a client may use an id again
    promises: dict[int, Promise] = {}
    for place in np.argsort(keys["position"], kind="stable").tolist():
        key = number.get(keys["key"][place], -1)  # -1: no file of it was seen; it keeps its place
        for request in index.get(keys["request_id"][place], ()):
            if request not in promises:
                arrival = int(requests["arrival_ns"][request])
                promises[request] = Promise(arrival, arrival, [], request=request, exact=True)
            promises[request].hits.append(key)
    # A request none of whose keys was seen is one that the engine names in other words.
    promises = {r: p for r, p in promises.items() if any(key >= 0 for key in p.hits)}
    told = requests["storage_hit_tokens"]
    for request, promise in promises.items():
        if unit_tokens and told[request] > 0:
            held = told[request] + max(requests["device_hit_tokens"][request], 0)
            promise.restored = int(held) // unit_tokens
    return list(promises.values())
