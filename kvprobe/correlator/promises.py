"""What requests were told is stored: bursts of lookups, matched to the requests that asked.

An engine tests a prompt's chunks one after another before it restores any; the answers are the
request's hit map. A burst is such a run of tests in one thread. It is matched to a request by
what the engine tells of both: it lies between arrival and prefill, and its hits are the request's
storage hits. Where the engine names the chunk keys itself, its word replaces the match.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from kvprobe.correlator.identify import KVFiles
from kvprobe.model import Frame
from kvprobe.schema import LookupKind

Ints = NDArray[np.int64]

GAP_FACTOR = 20
"""A pause this many times the usual one ends a burst."""
GAP_FLOOR_NS = 2_000_000
WRITE_FLAGS = 3
"""O_WRONLY | O_RDWR."""


@dataclass
class Promise:
    """Keys one request may restore, in prompt order, and since when."""

    start_ns: int
    end_ns: int
    hits: list[int]
    misses: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Rows of ``lookups`` behind it."""
    request: int = -1
    exact: bool = False


def bursts(lookups: Frame, files: KVFiles) -> list[Promise]:
    """Cut each thread's existence tests of KV files into bursts, by start time."""
    tests = np.flatnonzero(
        (files.lookup_key >= 0)
        & ~files.lookup_temporary
        & np.isin(lookups["kind"], (LookupKind.ACCESS, LookupKind.STAT))
    )
    tests = tests[~_before_store(lookups, files, tests)]
    order = np.lexsort((lookups["start_ns"][tests], lookups["tid"][tests]))
    tests = tests[order]
    same_thread = np.diff(lookups["tid"][tests]) == 0
    gaps = lookups["start_ns"][tests][1:] - lookups["end_ns"][tests][:-1]
    usual = np.median(gaps[same_thread]) if same_thread.any() else 0
    limit = max(GAP_FLOOR_NS, GAP_FACTOR * float(usual))
    cut = np.ones(len(tests), bool)
    cut[1:] = ~same_thread | (gaps > limit)
    found: list[Promise] = []
    for place, row in enumerate(tests.tolist()):
        key, hit = int(files.lookup_key[row]), bool(lookups["result"][row] >= 0)
        last = found[-1] if found else None
        if last is None or cut[place] or (hit and last.misses) or _repeats(last, key):
            last = Promise(int(lookups["start_ns"][row]), 0, [])
            found.append(last)
        (last.hits if hit else last.misses).append(key)
        last.rows.append(row)
        last.end_ns = int(lookups["end_ns"][row])
    return sorted(found, key=lambda p: p.start_ns)


def _repeats(promise: Promise, key: int) -> bool:
    # Chunks of one prompt are distinct; the first key is the one that prompts share.
    first = promise.hits[0] if promise.hits else promise.misses[0]
    return key == first or key in promise.misses[-1:]


def _before_store(lookups: Frame, files: KVFiles, tests: Ints) -> NDArray[np.bool_]:
    """Tests that a writer makes before it stores: its thread next opens that key for writing."""
    opens = np.flatnonzero(
        (files.lookup_key >= 0)
        & (lookups["kind"] == LookupKind.OPEN)
        & (lookups["open_flags"] >= 0)
        & ((lookups["open_flags"] & WRITE_FLAGS) > 0)
    )
    rows = np.concatenate([tests, opens])
    order = rows[np.lexsort((lookups["start_ns"][rows], lookups["tid"][rows]))]
    is_open = np.isin(order, opens)
    stores = np.zeros(len(order), bool)
    stores[:-1] = (
        is_open[1:]
        & ~is_open[:-1]
        & (files.lookup_key[order][1:] == files.lookup_key[order][:-1])
        & (lookups["tid"][order][1:] == lookups["tid"][order][:-1])
    )
    return np.isin(tests, order[stores])


def match(found: list[Promise], requests: Frame, unit_tokens: int | None) -> None:
    """Set ``request`` of each burst: at most one request each, least total cost.

    A burst fits a request when it lies between arrival and the start of prefill (or the first
    token). Cost is how far its hits are from the tokens the engine says came from storage, then
    how long after arrival it began: engines look up in order of arrival. Later bursts of the same
    keys by an already matched request (an engine that asks again each step) join it.
    """
    n = len(requests["arrival_ns"])
    if not found or not n:
        return
    edges = _edges(found, requests, unit_tokens)
    rows, columns, costs = edges
    if len(rows):
        # A private dummy request for each burst makes a full matching always possible.
        own = np.arange(len(found))
        graph = coo_array(
            (
                np.concatenate([costs, np.full(len(found), _UNMATCHED)]),
                (np.concatenate([rows, own]), np.concatenate([columns, n + own])),
            ),
            shape=(len(found), n + len(found)),
        ).tocsr()
        burst, request = min_weight_full_bipartite_matching(graph)
        for b, r in zip(burst.tolist(), request.tolist(), strict=True):
            if r < n:
                found[b].request = r
    _join_repeats(found, rows, columns)


_NEVER = np.iinfo(np.int64).max
_UNMATCHED = 1e6
_MISFIT = 1e3


def _edges(
    found: list[Promise], requests: Frame, unit_tokens: int | None
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Feasible (burst, request) pairs and their costs."""
    arrival = requests["arrival_ns"]
    deadline = np.where(
        requests["prefill_start_ns"] >= 0, requests["prefill_start_ns"], requests["first_token_ns"]
    )
    deadline = np.where(deadline >= 0, deadline, _NEVER)
    hits = requests["storage_hit_tokens"]
    prompt = requests["prompt_tokens"]
    order = np.argsort(arrival, kind="stable")
    longest = np.maximum.accumulate(deadline[order])
    longest_wait = max(
        int((deadline[deadline < _NEVER] - arrival[deadline < _NEVER]).max(initial=1)), 1
    )
    rows, columns, costs = [], [], []
    for b, promise in enumerate(found):
        stop = int(np.searchsorted(arrival[order], promise.start_ns, side="right"))
        begin = int(np.searchsorted(longest, promise.end_ns))
        if begin >= stop:
            continue
        near = order[begin:stop]
        near = near[deadline[near] >= promise.end_ns]
        # Convex, so that of two bursts the earlier goes to the earlier arrival.
        cost = 1 + ((promise.start_ns - arrival[near]) / longest_wait) ** 2
        if unit_tokens:
            tokens = len(promise.hits) * unit_tokens
            told = hits[near] >= 0
            # An engine may skip chunks it found (device hits) or leave the last one to prefill.
            misfit = np.where(told & (hits[near] > 0), np.abs(tokens - hits[near]) / unit_tokens, 0)
            cost = cost + _MISFIT * np.minimum(misfit, 100)
            asked = (len(promise.hits) + len(promise.misses)) * unit_tokens
            too_long = (prompt[near] >= 0) & (asked - unit_tokens >= prompt[near])
            near, cost = near[~too_long], cost[~too_long]
        rows += [b] * len(near)
        columns += near.tolist()
        costs += cost.tolist()
    return np.array(rows, np.int64), np.array(columns, np.int64), np.array(costs, np.float64)


def _join_repeats(found: list[Promise], rows: Ints, columns: Ints) -> None:
    matched = {p.request: p for p in found if p.request >= 0}
    fits: dict[int, list[int]] = {}
    for b, r in zip(rows.tolist(), columns.tolist(), strict=True):
        fits.setdefault(b, []).append(r)
    for b, promise in enumerate(found):
        if promise.request >= 0:
            continue
        asked = promise.hits + promise.misses
        for r in fits.get(b, ()):
            other = matched.get(r)
            if other is not None and set(asked) & set(other.hits + other.misses):
                promise.request = r
                break


def named_by_engine(keys: Frame, requests: Frame, files: KVFiles) -> list[Promise]:
    """Promises from the ``keys`` table: the engine itself says what a request restores."""
    number = {key: i for i, key in enumerate(files.keys)}
    index = {name: i for i, name in enumerate(requests["id"])}
    promises: dict[int, Promise] = {}
    for place in np.argsort(keys["position"], kind="stable").tolist():
        request = index.get(keys["request_id"][place])
        key = number.get(keys["key"][place])
        if request is None or key is None:
            continue
        arrival = int(requests["arrival_ns"][request])
        if request not in promises:
            promises[request] = Promise(arrival, arrival, [], request=request, exact=True)
        promises[request].hits.append(key)
    return list(promises.values())
