"""Tie block requests to the operations that caused them.

The block row names its file (from the request's bio) and, for direct I/O, where the operation
starts in that file; for buffered I/O, the first page. So a request belongs to an operation of the
same file that was open when the request was queued, and whose start or range it names. The
submitting thread decides between equals. Write-back happens after its write has returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.identify import last_not_after
from kvprobe.model import Frame
from kvprobe.schema import CUFILE_CALLS, BlockMethod, OpKind

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

CANDIDATES = 64
"""Operations of one file looked at per request, newest first: more than any engine keeps open
on one file. A request whose operation is older stays untied, and is counted as such."""


def tie(block: Frame, ops: Frame) -> Ints:
    """For each block row the index of its operation, or -1.

    Args:
        block: frame of the ``block`` table.
        ops: frame of the ``ops`` table (all operations, KV or not).
    """
    owner = np.full(len(block["done_ns"]), -1, np.int64)
    if not len(owner) or not len(ops["start_ns"]):
        return owner
    known = np.flatnonzero(block["inode"] >= 0)
    identity = np.concatenate(
        [
            np.stack([ops["fs_device"], ops["inode"]], axis=1),
            np.stack([block["fs_device"][known], block["inode"][known]], axis=1),
        ]
    )
    _, group = np.unique(identity, axis=0, return_inverse=True)
    group = group.reshape(-1)
    wanted, queued = group[len(ops["start_ns"]) :], _queued(block)
    owner[known] = _best(block, known, ops, wanted, group, queued[known])
    # An operation that is merged in front of a request before its issue gives it its name.
    alone = owner[known] < 0
    left = known[alone]
    issued = np.maximum(queued, block["issued_ns"])
    owner[left] = _best(block, left, ops, wanted[alone], group, issued[left])
    # No file in the bio (metadata, raw devices): the thread's own open operation.
    rest = np.flatnonzero((block["inode"] < 0) & (block["tid"] >= 0))
    threads = np.concatenate([ops["tid"], block["tid"][rest]])
    _, thread = np.unique(threads, return_inverse=True)
    owner[rest] = _best(block, rest, ops, thread[len(ops["tid"]) :], thread, queued[rest])
    return owner


def _best(block: Frame, rows: Ints, ops: Frame, wanted: Ints, group: Ints, latest: Ints) -> Ints:
    """Best-scoring candidate per row among ops of its group that began by ``latest``."""
    best = np.full(len(rows), -1, np.int64)
    best_score = np.zeros(len(rows), np.int64)
    group = group[: len(ops["start_ns"])]
    order = np.lexsort((ops["start_ns"], group))
    queued = _queued(block)[rows]
    place = last_not_after(group[order], ops["start_ns"][order], wanted, latest)
    # Read-ahead that a kernel thread submitted (throttled, io-wq) tells no more than its file.
    adrift = (block["op"][rows] == 0) & ~np.isin(block["tid"][rows], ops["tid"])
    for _ in range(CANDIDATES):
        alive = place >= 0
        alive[alive] = group[order[place[alive]]] == wanted[alive]
        if not alive.any():
            break
        index = np.flatnonzero(alive)
        candidate = order[place[index]]
        score = _score(block, rows[index], adrift[index], ops, candidate, queued[index])
        better = score > best_score[index]
        best[index[better]] = candidate[better]
        best_score[index[better]] = score[better]
        place -= 1
        place[best_score >= _PERFECT] = -1
    return best


_FILE, _THREAD, _RANGE, _START = 1, 2, 4, 5
_PERFECT = _RANGE + _THREAD
"""From here on no older candidate is better."""


def _score(
    block: Frame, rows: Ints, adrift: Flags, ops: Frame, candidate: Ints, queued: Ints
) -> Ints:
    """0: not this one. The place in the file outweighs the thread, which breaks ties."""
    offset, method = block["offset"][rows], block["method"][rows]
    start, requested = ops["offset"][candidate], ops["requested"][candidate]
    length = np.maximum(ops["result"][candidate], requested)
    # Without a file the offset is a place on the device.
    placed = (offset >= 0) & (start >= 0) & (block["inode"][rows] >= 0)
    inside = placed & (offset < start + length) & (offset + block["bytes"][rows] > start)
    # A driver that serves a call of cuFile cuts it into operations of its own.
    own = np.isin(ops["kind"][candidate], CUFILE_CALLS)
    direct = placed & (method == BlockMethod.DIRECT) & ~own
    place = np.where(direct, np.where(offset == start, _START, 0), np.where(inside, _RANGE, 0))
    is_write = ops["kind"][candidate] >= OpKind.WRITE
    reads, writes = block["op"][rows] == 0, block["op"][rows] == 1
    same_thread = block["tid"][rows] == ops["tid"][candidate]
    score = place + np.where(same_thread, _THREAD, np.where(adrift & placed, _FILE, 0))
    still_open = ops["end_ns"][candidate] >= queued
    late_write_back = is_write & (method == BlockMethod.PAGE) & inside
    possible = (
        np.where(is_write, writes, reads)
        & (still_open | late_write_back)
        & ~(direct & (offset != start))
    )
    return np.where(possible, score, 0)


def _queued(block: Frame) -> Ints:
    """When a request entered the block layer; completion where that is unknown."""
    return np.where(block["queued_ns"] >= 0, block["queued_ns"], block["done_ns"])
