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

from kvprobe.correlator.bursts import Promise, bursts
from kvprobe.correlator.identify import KVFiles
from kvprobe.correlator.waiting import Waiting, doubt, told_hits
from kvprobe.model import Frame

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_UNMATCHED = 1e6
_REPEATED = 3.0
"""Cost of leaving a burst unmatched that was asked before: above any good match, below a misfit."""
_COMPUTED = 10.0
"""Cost of hits that the engine was told of but did not restore."""
_MISFIT = 1e3


def asked(
    lookups: Frame,
    files: KVFiles,
    requests: Frame,
    unit_tokens: int | None,
    lossy: bool = False,
) -> list[Promise]:
    """Bursts of the window with the request each belongs to, -1 where none fits.

    A burst fits a request when it lies between arrival and the start of prefill (or the first
    token). Each request gets at most one at least total cost: how far its hits are from the
    tokens the engine says came from storage, then how long after arrival it began, as engines
    look up in order of arrival. Bursts of an engine that asks again each step join the first.
    """
    waiting = Waiting(requests, unit_tokens)
    found = bursts(lookups, files, waiting, lossy)
    fits = [_fitting(burst, waiting) for burst in found]
    _match(found, fits, len(requests["arrival_ns"]))
    _join_repeats(found, fits)
    return found


def _fitting(burst: Promise, waiting: Waiting) -> tuple[Ints, Floats]:
    """Requests that may have made this burst, and the cost of each."""
    near = waiting.at(burst.start_ns, burst.end_ns)
    # Convex, so that of two bursts the earlier goes to the earlier arrival.
    cost = 1 + waiting.waited(near, burst.start_ns) ** 2
    if not waiting.unit_tokens:
        return waiting.order[near], cost
    off = waiting.off(near, len(burst.hits))
    misfit = _MISFIT * np.minimum(off, 100)
    # None was restored: it may have computed what it found.
    misfit = np.where(waiting.units[near] == 0, np.where(off > 0, _COMPUTED, 0), misfit)
    cost = cost + misfit
    least = (len(burst.hits) + len(burst.misses) - 1) * waiting.unit_tokens
    possible = (waiting.prompt[near] < 0) | (least < waiting.prompt[near])
    return waiting.order[near[possible]], cost[possible]


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
    begin = requests["arrival_ns"] - doubt(requests)
    promises: dict[int, Promise] = {}
    for place in np.argsort(keys["position"], kind="stable").tolist():
        key = number.get(keys["key"][place], -1)  # -1: no file of it was seen; it keeps its place
        for request in index.get(keys["request_id"][place], ()):
            if request not in promises:
                arrival = int(begin[request])
                promises[request] = Promise(arrival, arrival, [], request=request, exact=True)
            promises[request].hits.append(key)
    # A request none of whose keys was seen is one that the engine names in other words.
    promises = {r: p for r, p in promises.items() if any(key >= 0 for key in p.hits)}
    told = told_hits(requests)
    for request, promise in promises.items():
        if unit_tokens and told[request] > 0:
            held = told[request] + max(requests["device_hit_tokens"][request], 0)
            promise.restored = int(held) // unit_tokens
    return list(promises.values())
