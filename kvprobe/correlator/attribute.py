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
    """
    n_ops = len(ops["start_ns"])
    op_request = np.full(n_ops, -1, np.int64)
    op_class = np.full(n_ops, NONE, np.int64)
    found = promises.asked(lookups, files, requests, unit_tokens)
    lookup_request = np.full(len(lookups["start_ns"]), -1, np.int64)
    for promise in found:
        lookup_request[promise.rows] = promise.request
    named = promises.named_by_engine(keys, requests, files)
    exact = {p.request for p in named}
    usable = named + [p for p in found if p.request >= 0 and p.request not in exact]
    transfers = (files.op_key >= 0) & (ops["result"] > 0)
    reads = np.flatnonzero(transfers & (ops["kind"] < OpKind.WRITE))
    for promise, run in runs.follow(reads, usable, requests, ops, files, fan_out):
        op_request[run] = promise.request
        op_class[run] = EXACT if promise.exact else THREAD
    writes = np.flatnonzero(transfers & (ops["kind"] >= OpKind.WRITE))
    _follow_misses(writes, usable, requests, ops, files, op_request, op_class)
    pairs = _by_window(
        np.concatenate([reads, writes]), requests, ops, op_request, op_class, unit_tokens
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
    transfers: Ints,
    requests: Frame,
    ops: Frame,
    op_request: Ints,
    op_class: Ints,
    unit_tokens: int | None,
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Operations no promise explains go to whoever was waiting; fills and returns the pairs."""
    arrival, deadline = requests["arrival_ns"], _deadline(requests)
    hits = requests["storage_hit_tokens"]
    computed_ns = np.where(
        requests["prefill_end_ns"] >= 0, requests["prefill_end_ns"], requests["first_token_ns"]
    )
    op_out, request_out, share_out = [], [], []
    for op in transfers.tolist():
        if op_request[op] >= 0:
            waiting, weight = np.array([op_request[op]]), np.ones(1)
        elif ops["kind"][op] < OpKind.WRITE:
            waits = (arrival >= 0) & (arrival <= ops["start_ns"][op]) & (hits != 0)
            waiting = np.flatnonzero(waits & (ops["end_ns"][op] <= deadline))
            weight = np.where(hits[waiting] > 0, hits[waiting], unit_tokens or 1).astype(float)
        else:
            stores = (computed_ns >= 0) & (computed_ns <= ops["start_ns"][op])
            recent = np.flatnonzero(stores & (requests["computed_tokens"] != 0))
            waiting = recent[np.argsort(computed_ns[recent])][-1:] if len(recent) else recent
            weight = np.ones(len(waiting))
        if not len(waiting):
            continue
        if op_request[op] < 0:
            op_request[op] = waiting[weight.argmax()]
            # A store by "whoever computed last" is a guess however few could have made it.
            lone = len(waiting) == 1 and ops["kind"][op] < OpKind.WRITE
            op_class[op] = WINDOW if lone else SHARED
        op_out += [op] * len(waiting)
        request_out += waiting.tolist()
        share_out += (weight / weight.sum()).tolist()
    return (
        np.array(op_out, np.int64),
        np.array(request_out, np.int64),
        np.array(share_out, np.float64),
    )


def _deadline(requests: Frame) -> Ints:
    """Until when a request can still wait for storage: first token, or for ever if unknown."""
    return np.where(
        requests["first_token_ns"] >= 0, requests["first_token_ns"], np.iinfo(np.int64).max
    )
