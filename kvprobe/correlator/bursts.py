"""Cut each thread's existence tests of KV files into bursts: one prompt's chunks, in order.

Engines test the prompts of waiting requests back to back in one thread, so time alone does not
tell where one prompt ends. Other marks do: chunks of one prompt are distinct, most engines stop
at the first miss, and a chunk's key is a hash over all before it, so that it has one predecessor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.identify import KVFiles
from kvprobe.model import Frame
from kvprobe.schema import LookupKind

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

GAP_FACTOR = 20
"""A pause this many times the usual one ends a burst."""
GAP_FLOOR_NS = 2_000_000
MISSES_PER_REQUEST = 1.5
"""Distinct missed keys per request up to which the engine is taken to stop at the first miss."""
DOUBLED_SHARE = 0.25
"""Share of tests that repeat the one before from which the engine is taken to ask twice."""
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
    """Rows of ``lookups`` behind it, one per key, hits first."""
    request: int = -1
    exact: bool = False
    restored: int | None = None
    """How many of ``hits``, from the first, the engine restored; None: all."""
    thread: int = -1
    paused: bool = False
    """Only a pause of its thread sets it apart from the burst before."""


def bursts(lookups: Frame, files: KVFiles, requests: int) -> list[Promise]:
    """Bursts by start time.

    Args:
        lookups: frame of the ``lookups`` table.
        files: KV keys of the lookups.
        requests: number of requests in the window.
    """
    tests = _tests(lookups, files)
    if not len(tests):
        return []
    key = files.lookup_key[tests]
    hit = lookups["result"][tests] >= 0
    pauses = _pauses(lookups, tests)
    cut = np.ones(len(tests), bool)
    cut[1:] = np.diff(lookups["tid"][tests]) != 0
    stops_at_miss = len(np.unique(key[~hit])) <= MISSES_PER_REQUEST * requests
    cut[1:] |= ~hit[:-1] & (hit[1:] | stops_at_miss)
    sure = cut.copy()
    cut |= pauses
    _cut_repeats(key, cut)
    _cut_heads(key, cut)
    found = []
    for rows in np.split(np.arange(len(tests)), np.flatnonzero(cut)[1:]):
        good, bad = rows[hit[rows]], rows[~hit[rows]]
        found.append(
            Promise(
                start_ns=int(lookups["start_ns"][tests[rows[0]]]),
                end_ns=int(lookups["end_ns"][tests[rows[-1]]]),
                hits=key[good].tolist(),
                misses=key[bad].tolist(),
                rows=tests[np.concatenate([good, bad])].tolist(),
                thread=int(lookups["tid"][tests[rows[0]]]),
                paused=bool(pauses[rows[0]] and not sure[rows[0]]),
            )
        )
    return sorted(found, key=lambda p: p.start_ns)


def mend(found: list[Promise], explained: Callable[[Promise], bool]) -> list[Promise]:
    """Join bursts that a thread's pause cut in two: the thread lost its processor, or its lock.

    A burst goes on after the pause where its next key follows the last one in another burst too,
    or is in the middle of another. It does not where that key begins other bursts. Where neither
    is known, it goes on if no request explains what there is of it, and against other bursts that
    begin so if one explains the whole.

    Args:
        found: bursts by start time.
        explained: whether some waiting request was told of just the hits of a burst.
    """
    pairs: set[tuple[int, int]] = set()
    inside: set[int] = set()
    heads: Counter[int] = Counter()
    for promise in found:
        keys = [*promise.hits, *promise.misses]
        pairs.update(pairwise(keys))
        inside.update(keys[1:])
        heads[keys[0]] += not promise.paused
    place: dict[int, int] = {}
    mended: list[Promise] = []
    for promise in found:
        before = mended[place[promise.thread]] if promise.thread in place else None
        if promise.paused and before is not None and before.hits and not before.misses:
            key = promise.hits[0] if promise.hits else promise.misses[0]
            whole = _joined(before, promise)
            follows = (before.hits[-1], key) in pairs or (key in inside and not heads[key])
            wanted = not explained(before) and (not heads[key] or explained(whole))
            if key not in before.hits and (follows or wanted):
                mended[place[promise.thread]] = whole
                continue
        place[promise.thread] = len(mended)
        mended.append(promise)
    return mended


def _joined(before: Promise, after: Promise) -> Promise:
    return replace(
        before,
        end_ns=after.end_ns,
        hits=before.hits + after.hits,
        misses=before.misses + after.misses,
        rows=before.rows + after.rows,
    )


def split(promise: Promise, lengths: list[int], lookups: Frame) -> list[Promise]:
    """Cut a promise after every ``lengths`` hits; misses stay with the last part."""
    parts, first = [], 0
    for number, length in enumerate(lengths, 1):
        last = number == len(lengths)
        place = slice(first, None if last else first + length)
        rows = promise.rows[place]
        parts.append(
            Promise(
                start_ns=int(lookups["start_ns"][rows[0]]),
                end_ns=int(lookups["end_ns"][rows].max()),
                hits=promise.hits[place],
                misses=promise.misses if last else [],
                rows=rows,
                thread=promise.thread,
            )
        )
        first += length
    return parts


def _tests(lookups: Frame, files: KVFiles) -> Ints:
    """Rows of existence tests, by thread and time; a test that is asked twice counts once."""
    tests = np.flatnonzero(
        (files.lookup_key >= 0)
        & ~files.lookup_temporary
        & np.isin(lookups["kind"], (LookupKind.ACCESS, LookupKind.STAT))
    )
    tests = tests[~_before_store(lookups, files, tests)]
    tests = tests[np.lexsort((lookups["start_ns"][tests], lookups["tid"][tests]))]
    again = np.zeros(len(tests), bool)
    again[1:] = (
        (np.diff(lookups["tid"][tests]) == 0)
        & (np.diff(files.lookup_key[tests]) == 0)
        & ~_pauses(lookups, tests)[1:]
    )
    return tests[~again] if again.sum() > DOUBLED_SHARE * len(tests) else tests


def _pauses(lookups: Frame, tests: Ints) -> Flags:
    """Whether a thread's test begins after a pause, or is its first."""
    cut = np.ones(len(tests), bool)
    same_thread = np.diff(lookups["tid"][tests]) == 0
    gaps = lookups["start_ns"][tests][1:] - lookups["end_ns"][tests][:-1]
    usual = float(np.median(gaps[same_thread])) if same_thread.any() else 0.0
    cut[1:] = ~same_thread | (gaps > max(GAP_FLOOR_NS, GAP_FACTOR * usual))
    return cut


def _cut_repeats(key: Ints, cut: Flags) -> None:
    """A key that the burst has already begins another: chunks of one prompt are distinct."""
    seen: set[int] = set()
    for place, (name, first) in enumerate(zip(key.tolist(), cut.tolist(), strict=True)):
        if first or name in seen:
            cut[place] = True
            seen.clear()
        seen.add(name)


def _cut_heads(key: Ints, cut: Flags) -> None:
    """A key that began other bursts begins one here, unless it usually follows this very key."""
    inside = np.flatnonzero(~cut)
    pairs = list(zip(key[inside - 1].tolist(), key[inside].tolist(), strict=True))
    together, followed = Counter(pairs), Counter(key[inside].tolist())
    own = [together[pair] > 1 and 2 * together[pair] >= followed[pair[1]] for pair in pairs]
    doubtful = inside[~np.array(own, bool)]
    before = -1
    while before != (before := int(cut.sum())):  # what was cut shows further heads
        cut[doubtful] |= np.isin(key[doubtful], key[cut])


def _before_store(lookups: Frame, files: KVFiles, tests: Ints) -> Flags:
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
