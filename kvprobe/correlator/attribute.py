"""Give each KV operation to the request that caused it, and say how it is known.

Classes, best first: ``exact`` (the engine named the request's keys), ``thread`` (one thread's
back-to-back reads follow one request's hit map), ``window`` (only one request was waiting on
storage), ``shared`` (several were: split by the bytes each expected), ``none``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import promises, runs
from kvprobe.correlator.bursts import Promise
from kvprobe.correlator.identify import KVFiles
from kvprobe.correlator.ledger import CLASSES
from kvprobe.correlator.waiting import doubt, told_hits
from kvprobe.model import Frame
from kvprobe.schema import OpKind

Ints = NDArray[np.int64]
EXACT, THREAD, WINDOW, SHARED, NONE = range(len(CLASSES))


@dataclass(frozen=True)
class Attribution:
    """Who caused what. ``pairs`` is (op, request, share); shares of one op sum to 1 or it has none.

    ``op_request`` is the request with the largest share, ``lookup_request`` that of each lookup.
    """

    pairs: tuple[Ints, Ints, NDArray[np.float64]]
    op_request: Ints
    op_class: Ints
    lookup_request: Ints


def attribute(
    requests: Frame,
    keys: Frame,
    lookups: Frame,
    ops: Frame,
    files: KVFiles,
    unit_tokens: int | None = None,
    fan_out: int = 1,
    lossy: bool = False,
) -> Attribution:
    """Attribute KV operations (``files.op_key >= 0``) and lookups to requests.

    Args:
        requests: frame of the ``requests`` table.
        keys: frame of the ``keys`` table; empty where the engine names none.
        lookups: frame of the ``lookups`` table.
        ops: frame of the ``ops`` table.
        files: KV keys of the lookups and operations.
        unit_tokens: tokens in one file, where the engine tells.
        fan_out: threads that may read for one request at once, where the engine tells.
        lossy: whether some lookups were lost.
    """
    n_ops = len(ops["start_ns"])
    op_request = np.full(n_ops, -1, np.int64)
    op_class = np.full(n_ops, NONE, np.int64)
    found = promises.asked(lookups, files, requests, unit_tokens, lossy)
    lookup_request = np.full(len(lookups["start_ns"]), -1, np.int64)
    for promise in found:
        lookup_request[promise.rows] = promise.request
    named = promises.named_by_engine(keys, requests, files, unit_tokens)
    exact = {p.request for p in named}
    usable = named + [p for p in found if p.request >= 0 and p.request not in exact]
    transfers = (files.op_key >= 0) & (ops["result"] > 0)
    reads = np.flatnonzero(transfers & (ops["kind"] < OpKind.WRITE))
    for promise, run in runs.follow(reads, usable, requests, ops, files, fan_out, lossy):
        op_request[run] = promise.request
        op_class[run] = EXACT if promise.exact else THREAD
    writes = np.flatnonzero(transfers & (ops["kind"] >= OpKind.WRITE))
    _follow_misses(writes, usable, requests, ops, files, op_request, op_class)
    _after_prefill(writes, requests, ops, op_request, op_class)
    split = _by_window(reads, requests, ops, op_request, op_class, unit_tokens)
    whole = np.flatnonzero((op_request >= 0) & ~np.isin(np.arange(n_ops), [op for op, *_ in split]))
    pairs = (
        np.concatenate([whole, *(np.full(len(who), op) for op, who, _ in split)]),
        np.concatenate([op_request[whole], *(who for _, who, _ in split)]),
        np.concatenate([np.ones(len(whole)), *(share for _, _, share in split)]),
    )
    return Attribution(pairs, op_request, op_class, lookup_request)


def _follow_misses(
    writes: Ints,
    usable: list[Promise],
    requests: Frame,
    ops: Frame,
    files: KVFiles,
    op_request: Ints,
    op_class: Ints,
) -> None:
    """A store of a key that a request looked up and missed is that request's."""
    by_key: dict[int, list[Promise]] = {}
    for promise in usable:
        for key in promise.hits if promise.exact else promise.misses:
            by_key.setdefault(key, []).append(promise)
    for op in writes.tolist():
        start = int(ops["start_ns"][op])
        asked = [p for p in by_key.get(int(files.op_key[op]), ()) if p.start_ns <= start]
        if asked:
            # Several may have missed it; the first to ask is the first to have computed it.
            first = min(asked, key=lambda p: int(requests["arrival_ns"][p.request]))
            op_request[op] = first.request
            op_class[op] = EXACT if first.exact else THREAD


def _by_window(
    reads: Ints,
    requests: Frame,
    ops: Frame,
    op_request: Ints,
    op_class: Ints,
    unit_tokens: int | None,
) -> list[tuple[int, Ints, NDArray[np.float64]]]:
    """Give reads that no promise explains to whoever waited: (op, requests, their shares)."""
    hits, late = told_hits(requests), doubt(requests)
    arrival, first_token = requests["arrival_ns"] - late, requests["first_token_ns"]
    # One that never gets its first token may wait for storage for ever.
    deadline = np.where(first_token >= 0, first_token + late, np.iinfo(np.int64).max)
    able = np.flatnonzero((requests["arrival_ns"] >= 0) & (hits != 0))
    able = able[np.argsort(arrival[able], kind="stable")]
    arrived, longest = arrival[able], np.maximum.accumulate(deadline[able])
    split = []
    for op in reads[op_request[reads] < 0].tolist():
        stop = np.searchsorted(arrived, ops["start_ns"][op], side="right")
        near = able[np.searchsorted(longest, ops["end_ns"][op]) : stop]
        waiting = near[deadline[near] >= ops["end_ns"][op]]
        if len(waiting):
            weight = np.where(hits[waiting] > 0, hits[waiting], unit_tokens or 1).astype(float)
            split.append((op, waiting, weight / weight.sum()))
            op_request[op] = waiting[weight.argmax()]
            op_class[op] = WINDOW if len(waiting) == 1 else SHARED
    return split


def _after_prefill(
    writes: Ints, requests: Frame, ops: Frame, op_request: Ints, op_class: Ints
) -> None:
    """Give stores that no miss explains to the request that computed last: a guess, so shared."""
    computed = np.where(
        requests["prefill_end_ns"] >= 0, requests["prefill_end_ns"], requests["first_token_ns"]
    )
    able = np.flatnonzero((computed >= 0) & (requests["computed_tokens"] != 0))
    able = able[np.argsort(computed[able], kind="stable")]
    rest = writes[op_request[writes] < 0]
    place = np.searchsorted(computed[able], ops["start_ns"][rest], side="right") - 1
    op_request[rest[place >= 0]] = able[place[place >= 0]]
    op_class[rest[place >= 0]] = SHARED
