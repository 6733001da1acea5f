"""Spans and the restore split: exact sums for any input, and examples worked out by hand."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.correlator import spans
from kvprobe.correlator.ledger import Restore, Spans

Pairs = list[tuple[int, int]]
time = st.integers(0, 1009)
milestone = st.one_of(st.just(-1), time)
pairs = st.lists(st.tuples(time, time), max_size=5)
block_rows = st.lists(st.tuples(milestone, milestone, time), max_size=6)


def activity(
    lookups: Pairs, reads: Pairs, rows: list[tuple[int, int, int]], share: float = 1.0
) -> spans.Activity:
    def column(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.array(values, np.int64)

    return spans.Activity(
        lookup_start_ns=column([a for a, _ in lookups]),
        lookup_end_ns=column([b for _, b in lookups]),
        read_start_ns=column([a for a, _ in reads]),
        read_end_ns=column([b for _, b in reads]),
        read_bytes=column([4099] * len(reads)),
        read_share=np.full(len(reads), share),
        queued_ns=column([q for q, _, _ in rows]),
        issued_ns=column([i for _, i, _ in rows]),
        done_ns=column([d for _, _, d in rows]),
    )


def values(part: Spans | Restore, *names: str) -> list[int]:
    return [asdict(part)[name] for name in names]


SPLIT = ("device_ns", "block_queue_ns", "software_ns", "idle_ns")


@given(time, milestone, milestone, time, pairs, pairs, block_rows)
def test_spans_partition_the_time_to_first_token_whatever_was_seen(
    arrival: int,
    prefill_start: int,
    prefill_end: int,
    wait: int,
    lookups: Pairs,
    reads: Pairs,
    rows: list[tuple[int, int, int]],
) -> None:
    what = activity(lookups, reads, rows)
    first_token = arrival + wait
    cut = spans.cut_ttft(arrival, prefill_start, prefill_end, first_token, what)
    assert min(asdict(cut).values()) >= 0
    assert sum(asdict(cut).values()) == wait
    restore = spans.cut_restore(what, arrival, prefill_start, first_token)
    if not reads:
        assert restore is None
        assert cut.restore_ns == 0
        return
    assert restore is not None
    assert min(values(restore, *SPLIT)) >= 0
    assert sum(values(restore, *SPLIT)) == restore.exposed_ns == cut.restore_ns
    whole = max(b for _, b in reads) - min(a for a, _ in reads)
    assert restore.hidden_ns >= 0
    assert restore.exposed_ns + restore.hidden_ns <= max(whole, 0)


@given(milestone, milestone, pairs, block_rows)
def test_a_restore_is_split_also_where_arrival_or_first_token_are_unknown(
    arrival: int, prefill_start: int, reads: Pairs, rows: list[tuple[int, int, int]]
) -> None:
    restore = spans.cut_restore(activity([], reads, rows), arrival, prefill_start, -1)
    assert (restore is None) == (not reads)
    if restore is not None:
        assert sum(values(restore, *SPLIT)) == restore.exposed_ns >= 0


#  arrival      lookups        reads            prefill        token
#    101 ... 104-107 109-113 ... 120 ... 167 ... 178 ....... 197 .. 200
HAND = activity(
    lookups=[(104, 107), (109, 113)],
    reads=[(120, 137), (130, 151), (160, 167)],
    rows=[(122, 125, 136), (131, 141, 149), (161, -1, 165)],
)


def test_every_span_of_a_hand_made_request() -> None:
    cut = spans.cut_ttft(101, 178, 197, 200, HAND)
    assert asdict(cut) == {
        "engine_queue_ns": 3,
        "lookup_ns": 9,
        "lookup_to_read_ns": 7,
        "restore_ns": 47,
        "read_to_prefill_ns": 11,
        "prefill_ns": 19,
        "other_ns": 3,
    }


def test_every_part_of_a_hand_made_restore() -> None:
    restore = spans.cut_restore(HAND, 101, 178, 200)
    assert restore is not None
    # Device: 125-136, 141-149, 161-165 (issue unknown: counted from the queue).
    # Queue: 122-125 and 136-141; the rest of 120-151 and 160-167 is software, 151-160 idle.
    assert values(restore, *SPLIT) == [11 + 8 + 4, 3 + 5, 2 + 2 + 3, 9]
    assert (restore.exposed_ns, restore.hidden_ns) == (47, 0)
    assert (restore.ops, restore.commands, restore.bytes) == (3, 3, 3 * 4099)
    assert restore.effective_depth == pytest.approx((17 + 21 + 7) / (31 + 7))


def test_a_restore_that_runs_into_its_prefill_is_hidden_from_there_on() -> None:
    cut = spans.cut_ttft(101, 143, 197, 200, HAND)
    restore = spans.cut_restore(HAND, 101, 143, 200)
    assert restore is not None
    assert (cut.restore_ns, cut.read_to_prefill_ns, cut.prefill_ns) == (23, 0, 54)
    assert (restore.exposed_ns, restore.hidden_ns) == (23, 24)
    assert values(restore, *SPLIT) == [11 + 2, 3 + 5, 2, 0]


def test_nothing_seen_is_explained_by_nothing() -> None:
    cut = spans.cut_ttft(101, -1, -1, 200, activity([], [], []))
    assert values(cut, "other_ns", "engine_queue_ns", "prefill_ns") == [99, 0, 0]


def test_unknown_start_of_prefill_leaves_the_rest_unexplained() -> None:
    cut = spans.cut_ttft(101, -1, -1, 200, HAND)
    assert values(cut, "restore_ns", "read_to_prefill_ns", "other_ns") == [47, 0, 33]
    looked_only = spans.cut_ttft(101, -1, -1, 200, activity([(104, 113)], [], []))
    assert values(looked_only, "engine_queue_ns", "lookup_ns", "other_ns") == [3, 9, 87]


def test_without_reads_the_wait_after_a_lookup_is_the_engine_queue() -> None:
    cut = spans.cut_ttft(101, 178, 197, 200, activity([(104, 113)], [], []))
    assert values(cut, "engine_queue_ns", "lookup_ns", "prefill_ns") == [3 + 65, 9, 19]


def test_lookups_after_the_first_read_do_not_count() -> None:
    late = activity([(104, 113), (125, 131)], [(120, 167)], [])
    cut = spans.cut_ttft(101, 178, 197, 200, late)
    assert values(cut, "lookup_ns", "lookup_to_read_ns", "restore_ns") == [9, 7, 47]


def test_a_shared_read_counts_its_share_of_bytes() -> None:
    restore = spans.cut_restore(activity([], [(120, 137), (140, 151)], [], 0.25), 101, 178, 200)
    assert restore is not None
    assert (restore.bytes, restore.ops) == (round(2 * 4099 * 0.25), 2)
