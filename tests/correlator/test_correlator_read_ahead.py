"""Read-ahead and page cache hits, byte by byte on hand-made reads."""

from typing import Any

import numpy as np
import pytest

from kvprobe.correlator.ledger import ReadAhead
from kvprobe.correlator.read_ahead import read_ahead
from kvprobe.schema import BlockMethod, OpKind
from tests.correlator.rows import FS, block, frame, op

Rows = list[dict[str, Any]]
KIB = 1024


def read(offset: int, size: int, inode: int = 7, **more: Any) -> dict[str, Any]:
    return op(100, 200, inode, offset, **({"requested": size, "direct": 0} | more))


def page(owner: int, offset: int, size: int, inode: int = 7, **more: Any) -> dict[str, Any]:
    """A device request; ``owner`` is the place of its operation."""
    row = block(110, 150, inode, offset, bytes=size, method=BlockMethod.PAGE)
    return row | {"owner": owner} | more


def account(ops: Rows, rows: Rows) -> ReadAhead | None:
    blocks = frame("block", rows)
    blocks["owner"] = np.array([row["owner"] for row in rows], np.int64)
    return read_ahead(frame("ops", ops), blocks)


def test_all_that_was_read_ahead_was_asked_for() -> None:
    ops = [read(0, 64 * KIB), read(64 * KIB, 64 * KIB)]
    rows = [page(0, 0, 128 * KIB)]
    assert account(ops, rows) == ReadAhead(131072, 131072, 0, 2, 1, 65536)


def test_read_ahead_beyond_what_was_asked_for() -> None:
    # Asked for 5000 bytes from 100 on: two pages. Of 128 KiB, 120 KiB are left over.
    rows = [page(0, 0, 128 * KIB)]
    assert account([read(100, 5000)], rows) == ReadAhead(5000, 131072, 120 * KIB, 1, 0, 0)


def test_a_later_read_of_another_thread_uses_it_too() -> None:
    ops = [read(0, 4096), read(96 * KIB, 8 * KIB, tid=22), read(124 * KIB, 64 * KIB, tid=23)]
    rows = [page(0, 0, 128 * KIB)]
    found = account(ops, rows)
    assert found
    assert found.unused_bytes == (128 - 4 - 8 - 4) * KIB
    assert (found.ops_without_device, found.cached_bytes) == (2, 72 * KIB)


def test_overlapping_reads_do_not_count_twice() -> None:
    ops = [read(0, 16 * KIB), read(8 * KIB, 16 * KIB), read(0, 16 * KIB)]
    found = account(ops, [page(0, 0, 32 * KIB)])
    assert found
    assert (found.asked_bytes, found.unused_bytes) == (48 * KIB, 8 * KIB)


def test_files_do_not_mix() -> None:
    ops = [read(0, 4096, 7), read(4096, 4096, 8), read(8192, 4096, 7, fs_device=FS + 1)]
    rows = [
        page(0, 0, 16 * KIB, 7),
        page(1, 0, 16 * KIB, 8),
        page(2, 0, 16 * KIB, 7, fs_device=FS + 1),
    ]
    found = account(ops, rows)
    assert found
    assert (found.device_bytes, found.unused_bytes) == (48 * KIB, 36 * KIB)


def test_only_buffered_reads_and_their_pages_count() -> None:
    ops = [
        read(0, 8 * KIB),
        read(0, 64 * KIB, 9, direct=1),
        read(0, 64 * KIB, 7, kind=OpKind.WRITE),
        read(4096, 4096, result=-5),
    ]
    rows = [
        page(0, 0, 8 * KIB),
        page(1, 0, 64 * KIB, 9, method=BlockMethod.DIRECT),
        page(2, 0, 64 * KIB, op=1),
        page(-1, 64 * KIB, 64 * KIB),
    ]
    assert account(ops, rows) == ReadAhead(8192, 8192, 0, 1, 0, 0)


def test_pages_of_unknown_place_are_neither_used_nor_wasted() -> None:
    rows = [page(0, 0, 8 * KIB), page(0, -1, 64 * KIB)]
    found = account([read(0, 4096)], rows)
    assert found
    assert (found.device_bytes, found.unused_bytes) == (72 * KIB, 4 * KIB)


def test_no_buffered_reads() -> None:
    assert account([read(0, 4096, direct=1)], [page(0, 0, 4096)]) is None
    assert account([], []) is None


@pytest.mark.parametrize("seed", range(5))
def test_against_a_bitmap_of_pages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops = [
        read(int(rng.integers(0, 40_000)), int(rng.integers(1, 20_000)), int(rng.integers(5, 8)))
        for _ in range(11)
    ]
    rows = []
    for _ in range(17):
        owner = int(rng.integers(0, 11))
        offset, size = 4096 * int(rng.integers(0, 17)), 4096 * int(rng.integers(1, 13))
        rows.append(page(owner, offset, size, ops[owner]["inode"]))
    asked = {
        (o["inode"], p)
        for o in ops
        for p in range(o["offset"] // 4096, (o["offset"] + o["result"] - 1) // 4096 + 1)
    }
    unused = sum(
        (r["inode"], p) not in asked
        for r in rows
        for p in range(r["offset"] // 4096, (r["offset"] + r["bytes"]) // 4096)
    )
    found = account(ops, rows)
    assert found
    assert found.unused_bytes == 4096 * unused > 0
