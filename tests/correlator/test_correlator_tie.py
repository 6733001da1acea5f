"""Block requests to operations: every rule by hand, then random runs whose owners are known."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.correlator.tie import tie
from kvprobe.schema import BlockMethod, OpKind
from tests.correlator.rows import FS, block, frame, op

Rows = list[dict[str, Any]]
KWORKER, FLUSHER = 901, 902
PAGE: dict[str, Any] = {"method": BlockMethod.PAGE}
NO_FILE: dict[str, Any] = {
    "inode": None,
    "fs_device": None,
    "offset": None,
    "method": BlockMethod.NONE,
}


def owners(ops: Rows, rows: Rows) -> list[int]:
    return [int(owner) for owner in tie(frame("block", rows), frame("ops", ops))]


def test_two_threads_read_one_file_at_once() -> None:
    ops = [op(100, 200, tid=21), op(101, 190, tid=22)]
    rows = [block(110, 150, tid=21), block(110, 150, tid=22)]
    assert owners(ops, rows) == [0, 1]


def test_the_offset_of_a_direct_operation_decides_before_the_thread() -> None:
    ops = [op(100, 200, offset=0, tid=21), op(105, 200, offset=8192, tid=21)]
    rows = [block(110, 150, offset=8192, tid=KWORKER), block(111, 150, offset=0, tid=KWORKER)]
    assert owners(ops, rows) == [1, 0]


def test_all_requests_of_a_large_direct_operation_name_its_start() -> None:
    ops = [op(100, 900, offset=4096, requested=1 << 20), op(100, 900, offset=1 << 21, tid=22)]
    rows = [block(110 + i, 500, offset=4096, sector=8 * i, bytes=131072) for i in range(8)]
    assert owners(ops, rows) == [0] * 8


def test_a_direct_request_never_joins_an_operation_it_does_not_name() -> None:
    # The row of the operation at 8192 was lost; its thread has another one open.
    ops = [op(100, 200, offset=0, kind=OpKind.URING_READ, requested=65536)]
    assert owners(ops, [block(110, 150, offset=8192)]) == [-1]


def test_an_operation_that_was_merged_in_front_of_a_request_names_it() -> None:
    # Begun by the first, but its lowest sectors are those of the second.
    ops = [op(100, 200, kind=OpKind.URING_READ), op(115, 200, inode=8, kind=OpKind.URING_READ)]
    merged = block(110, 190, inode=8, bytes=8192, issued_ns=120)
    assert owners(ops, [merged, merged | {"issued_ns": 114}]) == [1, -1]


def test_an_operation_of_unknown_place_is_found_by_thread() -> None:
    ops = [op(100, 200) | {"offset": None}, op(101, 200, tid=22) | {"offset": None}]
    assert owners(ops, [block(110, 150, offset=512, tid=21)]) == [0]


def test_operations_that_had_ended_or_not_begun_do_not_own() -> None:
    ops = [op(100, 109), op(111, 200)]
    assert owners(ops, [block(110, 150)]) == [-1]
    assert owners(ops, [block(109, 150), block(111, 150)]) == [0, 1]


def test_buffered_reads_are_found_by_page_range() -> None:
    ops = [
        op(100, 200, offset=100, requested=5000, tid=21, direct=0),
        op(101, 200, offset=16384, requested=8192, tid=22, direct=0),
    ]
    rows = [
        block(110, 150, offset=4096, tid=KWORKER, **PAGE),
        block(111, 150, offset=20480, tid=KWORKER, **PAGE),
        block(112, 150, offset=0, tid=KWORKER, **PAGE),
    ]
    assert owners(ops, rows) == [0, 1, 0]


def test_a_page_that_one_asked_for_and_another_read_ahead_is_of_the_one_who_asked() -> None:
    ops = [op(100, 200, tid=21, direct=0), op(101, 200, tid=22, offset=1 << 20, direct=0)]
    assert owners(ops, [block(110, 150, offset=1 << 20, tid=21, **PAGE)]) == [1]


def test_read_ahead_beyond_the_range_goes_to_the_thread_that_asked() -> None:
    ops = [op(100, 200, tid=21, direct=0), op(101, 200, tid=22, offset=1 << 20, direct=0)]
    rows = [
        block(110, 150, offset=1 << 16, bytes=131072, tid=21, **PAGE),
        block(110, 150, offset=1 << 22, bytes=131072, tid=22, **PAGE),
    ]
    assert owners(ops, rows) == [0, 1]


def test_read_ahead_that_a_kernel_thread_submits_goes_to_the_newest_reader_of_the_file() -> None:
    ops = [op(100, 200, tid=21, direct=0), op(101, 200, inode=8, tid=22, direct=0)]
    held = block(150, 190, offset=1 << 16, bytes=131072, tid=KWORKER, held=1, **PAGE)
    assert owners(ops, [held, held | {"inode": 9}]) == [0, -1]
    # A thread that reads for itself submits for itself.
    assert owners(ops, [held | {"tid": 22}]) == [-1]


def test_a_throttled_direct_request_comes_from_a_kernel_thread() -> None:
    ops = [op(100, 90_000), op(101, 95_000, inode=8, tid=22), op(99, 80_000, inode=9, tid=23)]
    rows = [block(70_000, 70_500, inode=i, tid=KWORKER, held=1) for i in (9, 7, 8)]
    assert owners(ops, rows) == [2, 0, 1]


def test_write_back_finds_the_write_that_returned_long_before() -> None:
    ops = [
        op(100, 110, offset=0, requested=65536, kind=OpKind.WRITE, direct=0),
        op(120, 130, offset=65536, requested=65536, kind=OpKind.WRITE, direct=0),
        op(140, 150, offset=0, requested=65536, direct=0),
    ]
    rows = [
        block(5_000_000, 5_000_900, offset=offset, op=1, tid=FLUSHER, bytes=32768, **PAGE)
        for offset in (0, 32768, 65536, 131072)
    ]
    assert owners(ops, rows) == [0, 0, 1, -1]


def test_pages_written_twice_belong_to_the_last_write() -> None:
    ops = [op(100 * i, 100 * i + 9, kind=OpKind.PWRITE64, direct=0) for i in range(1, 4)]
    rows = [block(250, 290, op=1, tid=FLUSHER, **PAGE), block(950, 990, op=1, tid=FLUSHER, **PAGE)]
    assert owners(ops, rows) == [1, 2]


def test_direction_must_agree() -> None:
    reader, writer = op(100, 200), op(101, 200, kind=OpKind.PWRITE64)
    rows = [block(110, 150, op=0), block(110, 150, op=1)]
    assert owners([reader, writer], rows) == [0, 1]
    assert owners([writer], rows) == [-1, 0]


@pytest.mark.parametrize("operation", [2, 3])
def test_flushes_and_discards_belong_to_no_operation(operation: int) -> None:
    ops = [op(100, 200), op(100, 200, kind=OpKind.PWRITE64, tid=22)]
    rows = [block(110, 150, op=operation, tid=tid, **NO_FILE) for tid in (21, 22)]
    assert owners(ops, rows) == [-1, -1]


def test_metadata_goes_to_the_open_operation_of_its_thread() -> None:
    ops = [op(100, 200, tid=21), op(100, 200, inode=8, tid=22), op(300, 400, inode=9, tid=21)]
    rows = [block(at, at + 9, tid=tid, **NO_FILE) for at, tid in ((110, 22), (310, 21), (250, 21))]
    assert owners(ops, rows) == [1, 2, -1]


def test_a_place_on_the_device_is_no_place_in_a_file() -> None:
    # Two operations of one thread; the metadata block lies where the older one's range would be.
    kind = OpKind.URING_READ
    ops = [op(100, 200, offset=1 << 20, kind=kind), op(105, 200, inode=8, kind=kind)]
    row = NO_FILE | {"offset": 1 << 20, "method": BlockMethod.RAW_DEVICE}
    assert owners(ops, [block(110, 150, **row)]) == [1]


def test_equal_inodes_of_two_file_systems() -> None:
    ops = [op(100, 200), op(101, 200, fs_device=FS + 1)]
    rows = [block(110, 150, tid=KWORKER), block(110, 150, fs_device=FS + 1, tid=KWORKER)]
    assert owners(ops, rows) == [0, 1]


def test_rows_that_match_nothing_stay_untied() -> None:
    ops = [op(100, 200)]
    rows = [
        block(110, 150, inode=99),
        block(110, 150, tid=77, **NO_FILE),
        block(110, 150, **(NO_FILE | {"tid": None})),
        block(10, 20),
    ]
    assert owners(ops, rows) == [-1] * 4


def test_a_row_without_queue_time_is_placed_by_its_end() -> None:
    ops = [op(100, 200), op(300, 400)]
    assert owners(ops, [block(0, 350) | {"queued_ns": None}]) == [1]


def test_empty_tables() -> None:
    assert owners([], [block(110, 150)]) == [-1]
    assert owners([op(100, 200)], []) == []


def direct_run(seed: int, threads: int, depth: int, files: int) -> tuple[Rows, Rows, list[int]]:
    """Direct reads of some threads, each with up to ``depth`` in flight, one to four requests each.

    Two reads of one place that are open together are left out: nothing could tell them apart.
    A part of the requests is submitted by a kernel thread.
    """
    rng = random.Random(seed)
    ops: Rows = []
    rows: list[tuple[dict[str, Any], int]] = []
    for tid in range(21, 21 + threads):
        slots = [rng.randrange(1000) for _ in range(depth)]
        for _ in range(40):
            slots.sort()
            start = slots.pop(0)
            inode, offset = rng.randrange(7, 7 + files), 4096 * rng.randrange(12)
            end = start + rng.randrange(50, 2000)
            if any(
                o["inode"] == inode
                and o["offset"] == offset
                and o["start_ns"] <= end
                and start <= o["end_ns"]
                for o in ops
            ):
                slots.append(start + 1)
                continue
            kind = OpKind.URING_READ if depth > 1 else OpKind.PREAD64
            ops.append(op(start, end, inode, offset, tid=tid, kind=kind))
            for _ in range(rng.randrange(1, 5)):
                queued = rng.randrange(start, end)
                submitter = rng.choice([tid, tid, KWORKER])
                done = rng.randrange(queued, end + 1)
                rows.append((block(queued, done, inode, offset, tid=submitter), len(ops) - 1))
            slots.append(end + rng.randrange(1, 20))
    rng.shuffle(rows)
    return ops, [row for row, _ in rows], [owner for _, owner in rows]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (4, 1), (1, 16), (3, 5)]), st.integers(1, 5))
def test_direct_requests_of_a_random_run_all_find_their_owner(
    seed: int, shape: tuple[int, int], files: int
) -> None:
    ops, rows, want = direct_run(seed, *shape, files)
    assert owners(ops, rows) == want
