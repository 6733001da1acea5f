"""Cut each thread's existence tests of KV files into bursts: one prompt's chunks, in order.

Engines test the prompts of waiting requests back to back in one thread, so time alone does not
tell where one prompt ends. Other marks do: chunks of one prompt are distinct, most engines stop
at the first miss, and a chunk's key is a hash over all before it, so that it has one predecessor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.division import Hits, divide
from kvprobe.correlator.identify import KVFiles
from kvprobe.correlator.waiting import Waiting
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


def bursts(lookups: Frame, files: KVFiles, waiting: Waiting, lossy: bool = False) -> list[Promise]:
    """Bursts by start time.

    Args:
        lookups: frame of the ``lookups`` table.
        files: KV keys of the lookups.
        waiting: the requests that may have asked.
        lossy: whether some lookups were lost.
    """
    tests = existence_tests(lookups, files)
    if not len(tests):
        return []
    key, hit = files.lookup_key[tests], lookups["result"][tests] >= 0
    pause = _pauses(lookups, tests)
    cut = pause & ~_goes_on(lookups, tests, pause, waiting)
    stops_at_miss = len(np.unique(key[~hit])) <= MISSES_PER_REQUEST * len(waiting.order)
    cut[1:] |= ~hit[:-1] & (hit[1:] | stops_at_miss)
    head = _heads(key, pause, cut)
    edges = [*np.flatnonzero(cut).tolist(), len(tests)]
    for first, last in itertools.pairwise(edges.copy()):
        good = first + int(hit[first:last].sum())
        rows = tests[first:good]
        hits = Hits(
            lookups["start_ns"][rows].tolist(),
            lookups["end_ns"][rows].tolist(),
            pause[first:good],
            head[first:good],
            _limits(key[first:good]),
        )
        edges += itertools.accumulate(divide(hits, waiting, lossy)[:-1], initial=first)
    found = [
        _promise(lookups, tests[first:last], key[first:last], hit[first:last])
        for first, last in itertools.pairwise(sorted(set(edges)))
    ]
    return sorted(found, key=lambda promise: promise.start_ns)


def _promise(lookups: Frame, rows: Ints, key: Ints, hit: Flags) -> Promise:
    return Promise(
        start_ns=int(lookups["start_ns"][rows[0]]),
        end_ns=int(lookups["end_ns"][rows[-1]]),
        hits=key[hit].tolist(),
        misses=key[~hit].tolist(),
        rows=rows.tolist(),
    )


def existence_tests(lookups: Frame, files: KVFiles) -> Ints:
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
    pause = np.ones(len(tests), bool)
    same_thread = np.diff(lookups["tid"][tests]) == 0
    gaps = lookups["start_ns"][tests][1:] - lookups["end_ns"][tests][:-1]
    usual = float(np.median(gaps[same_thread])) if same_thread.any() else 0.0
    pause[1:] = ~same_thread | (gaps > max(GAP_FLOOR_NS, GAP_FACTOR * usual))
    return pause


def _goes_on(lookups: Frame, tests: Ints, pause: Flags, waiting: Waiting) -> Flags:
    """Pauses that some request waited through: they may lie within one prompt."""
    goes_on = np.zeros(len(tests), bool)
    for place in np.flatnonzero(pause)[1:].tolist():
        before, row = int(tests[place - 1]), int(tests[place])
        if lookups["tid"][before] == lookups["tid"][row]:
            span = int(lookups["start_ns"][before]), int(lookups["end_ns"][row])
            goes_on[place] = len(waiting.at(*span)) > 0
    return goes_on


def _limits(key: Ints) -> list[int]:
    """For each key the place at which some key after it comes again: chunks are distinct."""
    limits = [len(key)] * len(key)
    seen: dict[int, int] = {}
    begin = 0
    for place, name in enumerate(key.tolist()):
        again = seen.get(name, -1)
        if again >= begin:
            limits[begin : again + 1] = [place] * (again + 1 - begin)
            begin = again + 1
        seen[name] = place
    return limits


def _heads(key: Ints, pause: Flags, cut: Flags) -> Flags:
    """Keys that began other bursts and so begin one, unless they usually follow the one before."""
    head = cut.copy()
    for first, last in itertools.pairwise([*np.flatnonzero(cut).tolist(), len(key)]):
        again = first + _limits(key[first:last])[0]
        # A key that comes again without a pause in between begins a prompt.
        if again < last and not pause[first + 1 : again + 1].any():
            head[again] = True
    inside = np.flatnonzero(~cut)
    pairs = list(zip(key[inside - 1].tolist(), key[inside].tolist(), strict=True))
    together, followed = Counter(pairs), Counter(key[inside].tolist())
    own = [together[pair] > 1 and 2 * together[pair] >= followed[pair[1]] for pair in pairs]
    doubtful = inside[~np.array(own, bool)]
    before = -1
    while before != (before := int(head.sum())):  # what begins here shows further heads
        head[doubtful] |= np.isin(key[doubtful], key[head])
    return head


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
