"""Buffered KV reads against what the device delivered: page cache hits and wasted read-ahead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import ReadAhead
from kvprobe.model import Frame
from kvprobe.schema import BlockMethod, OpKind

Ints = NDArray[np.int64]


def read_ahead(ops: Frame, block: Frame) -> ReadAhead | None:
    """Compare bytes asked for with bytes read, per file; None without buffered KV reads.

    Args:
        ops: KV operations.
        block: block rows with ``owner`` (index into ``ops``).

    A byte the device read is unused when no buffered read of the window, before or after, asked
    for its place in the file. Bytes asked for after the window count as unused, so the figure is
    an upper bound that tightens with the length of the capture.
    """
    reads = (ops["kind"] < OpKind.WRITE) & (ops["result"] > 0) & (ops["direct"] == 0)
    index = np.flatnonzero(reads)
    if not len(index):
        return None
    owner = block["owner"]
    from_cache_path = (owner >= 0) & (block["method"] == BlockMethod.PAGE) & (block["op"] == 0)
    rows = np.flatnonzero(from_cache_path & reads[np.maximum(owner, 0)])
    served = np.zeros(len(ops["kind"]), bool)
    served[owner[rows]] = True
    cached = index[~served[index]]
    placed = rows[block["offset"][rows] >= 0]
    used = _used_bytes(ops, index, block, placed)
    return ReadAhead(
        asked_bytes=int(ops["result"][index].sum()),
        device_bytes=int(block["bytes"][rows].sum()),
        unused_bytes=int(block["bytes"][placed].sum()) - used,
        ops=len(index),
        ops_without_device=len(cached),
        cached_bytes=int(ops["result"][cached].sum()),
    )


def _used_bytes(ops: Frame, index: Ints, block: Frame, placed: Ints) -> int:
    """Delivered bytes whose place in the file some buffered read asked for.

    Rounded up to whole pages on both sides, since a page is what the device must deliver.
    """
    page = 4096
    asked = index[ops["offset"][index] >= 0]
    identity = np.concatenate(
        [
            np.stack([ops["fs_device"][asked], ops["inode"][asked]], axis=1),
            np.stack([block["fs_device"][placed], block["inode"][placed]], axis=1),
        ]
    )
    if not len(identity):
        return 0
    _, group = np.unique(identity, axis=0, return_inverse=True)
    group = group.reshape(-1)
    # One number line for all files: each file gets its own stretch.
    ends = ops["offset"][asked] + ops["result"][asked]
    stop = block["offset"][placed] + block["bytes"][placed]
    stride = (int(max(ends.max(initial=0), stop.max(initial=0))) // page + 2) * page
    base = group * stride
    wanted = intervals.union(
        base[: len(asked)] + ops["offset"][asked] // page * page,
        base[: len(asked)] + -(-ends // page) * page,
    )
    low = base[len(asked) :] + block["offset"][placed]
    high = base[len(asked) :] + stop
    below = intervals.covered_below
    return int((below(*wanted, high) - below(*wanted, low)).sum())
