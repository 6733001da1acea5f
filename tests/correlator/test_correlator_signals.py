"""What engines tell only in part: sums of tiers, uncertain times, counters of the whole node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe import notes
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import Ledger, correlate
from kvprobe.correlator.hits import fill_in
from kvprobe.correlator.ledger import EngineTotal
from kvprobe.correlator.totals import engine_totals, times_of_increase
from kvprobe.findings import detect_all
from kvprobe.model import Frame, Verdict

from .rows import frame
from .simulate import Node

S = 1_000_000_000
PAGE = "vllm:prefix_cache_hits_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"
FS = "engine=0,model_name=tiny,tier=1:fs"


def with_requests(tables: FixedTables, **columns: Any) -> Ledger:
    frames = {n: tables.frame(n) for n in ("requests", "ops", "block", "lookups")}
    changed = {name: np.broadcast_to(value, 211).copy() for name, value in columns.items()}
    frames["requests"] = {**frames["requests"], **changed}
    return correlate(FixedTables(tables.manifest, frames))


@pytest.fixture(scope="module")
def node() -> FixedTables:
    return Node(5, 4).run().capture()


def test_a_sum_of_tiers_is_split_by_what_was_read(node: FixedTables) -> None:
    whole = correlate(node)
    told = node.frame("requests")["storage_hit_tokens"]
    ledger = with_requests(node, storage_hit_tokens=-1, offload_hit_tokens=told)
    pairs = list(zip(ledger.accounts, whole.accounts, strict=True))
    assert len(pairs) == 211
    assert [a.storage_hit_tokens for a, _ in pairs] == [b.storage_hit_tokens for _, b in pairs]
    assert {a.host_hit_tokens for a, _ in pairs} == {0}
    assert [a.verdict for a, _ in pairs] == [b.verdict for _, b in pairs]
    assert ledger.attributed_bytes == whole.attributed_bytes


def test_what_host_memory_held_is_not_taken_for_storage(node: FixedTables) -> None:
    told = node.frame("requests")["storage_hit_tokens"]
    ledger = with_requests(
        node, storage_hit_tokens=-1, offload_hit_tokens=np.where(told >= 0, told + 160, -1)
    )
    whole = correlate(node)
    good = sum(
        (a.storage_hit_tokens, a.host_hit_tokens) == (b.storage_hit_tokens, 160)
        for a, b in zip(ledger.accounts, whole.accounts, strict=True)
    )
    assert good >= 0.95 * 211


def test_vague_times_give_no_spans_and_no_verdict(node: FixedTables) -> None:
    whole = correlate(node)
    ledger = with_requests(node, uncertainty_ns=S // 2)
    longest = max(a.ttft_ns or 0 for a in whole.accounts)
    assert longest < 5 * S
    for account, before in zip(ledger.accounts, whole.accounts, strict=True):
        assert account.vague and account.spans is None and account.verdict == Verdict.UNKNOWN
        assert account.ttft_ns == before.ttft_ns and account.uncertainty_ns == S // 2
        assert account.restore is None and account.recompute_ns is None
    assert ledger.restore is None and not detect_all(ledger)
    assert ledger.break_even.restore_n == ledger.break_even.recompute_n == 0
    assert sum(ledger.attributed_bytes.values()) == sum(whole.attributed_bytes.values())
    assert any("211 requests have times too uncertain" in note for note in notes.left_out(ledger))


def test_a_sum_is_not_split_by_reads_that_may_be_of_others(node: FixedTables) -> None:
    told = node.frame("requests")["storage_hit_tokens"]
    ledger = with_requests(
        node, storage_hit_tokens=-1, offload_hit_tokens=told, uncertainty_ns=S // 2
    )
    assert {a.storage_hit_tokens for a in ledger.accounts} == {None}
    assert {a.host_hit_tokens for a in ledger.accounts} == {None}
    assert [a.offload_hit_tokens for a in ledger.accounts] == told.tolist()


def test_a_small_doubt_changes_nothing(node: FixedTables) -> None:
    whole, ledger = correlate(node), with_requests(node, uncertainty_ns=1009)
    assert [replace(a, uncertainty_ns=None) for a in ledger.accounts] == [
        replace(a, uncertainty_ns=None) for a in whole.accounts
    ]


# ---------------------------------------------------------------- counters


def pages(*rows: tuple[int, str, str, float]) -> Frame:
    names = ("time_ns", "metric", "subject", "value")
    return frame("host", [dict(zip(names, row, strict=True)) for row in rows])


def test_totals_are_increases_over_all_series_that_are_meant() -> None:
    host = pages(
        (1 * S, READ, FS, 1_000.0),
        (1 * S, READ, "engine=0,tier=0:primary", 7.0),
        (1 * S, PAGE, "engine=0", 31.0),
        (2 * S, READ, FS, 5_003.0),
        (2 * S, READ, "engine=0,tier=0:primary", 9_007.0),
        (3 * S, READ, "engine=1,model_name=tiny,tier=2:fs", 10_007.0),  # begins at zero
        (4 * S, READ, FS, 101.0),  # a restart
        (5 * S, PAGE, "engine=0", 31.0),
        (5 * S, "unrelated_total", "", 1.0),
    )
    found = {t.name: t for t in engine_totals(host, {"read_bytes": 14_111})}
    assert set(found) == {"read_bytes", "device_hit_tokens"}
    assert found["read_bytes"].counted == 4_003 + 10_007 + 101 == found["read_bytes"].seen
    assert (found["device_hit_tokens"].counted, found["device_hit_tokens"].seen) == (0, None)
    assert {t.pages for t in found.values()} == {5}


def test_one_page_says_nothing() -> None:
    assert engine_totals(pages((S, READ, FS, 5.0)), {}) == ()
    assert engine_totals(pages(), {}) == ()
    assert times_of_increase(pages((S, PAGE, "", 5.0)), "device_hit_tokens") is None


def test_device_hits_are_zero_where_none_were_counted_meanwhile() -> None:
    host = pages(
        (10 * S, PAGE, "engine=0", 5.0),
        (20 * S, READ, FS, 1.0),
        (21 * S, PAGE, "engine=0", 103.0),  # between 20 and 21
        (40 * S, PAGE, "engine=0", 103.0),
    )
    ends = {"before any page": (9, 12), "quiet": (11, 19), "rise inside": (20, 22),
            "rise at its end": (19, 20), "after": (22, 30), "after all": (39, 41),
            "spans it": (12, 30), "unfinished": (23, -1)}  # fmt: skip
    requests = frame("requests", [
        {"id": name, "arrival_ns": a * S, "first_token_ns": f * S if f > 0 else -1,
         "prompt_tokens": 1009, "offload_hit_tokens": 512, "uncertainty_ns": 0}
        for name, (a, f) in ends.items()
    ])  # fmt: skip
    filled = fill_in(requests, host)
    known = {
        n for n, hits in zip(ends, filled["device_hit_tokens"].tolist(), strict=True) if not hits
    }
    assert known == {"quiet", "after"}
    rest = dict(zip(ends, filled["computed_tokens"].tolist(), strict=True))
    assert {rest[name] for name in known} == {1009 - 512}
    assert {rest[name] for name in set(ends) - known} == {-1}


def test_what_the_engine_told_of_a_request_is_kept() -> None:
    host = pages((1 * S, PAGE, "", 0.0), (9 * S, PAGE, "", 0.0))
    requests = frame("requests", [
        {"id": "a", "arrival_ns": 2 * S, "first_token_ns": 3 * S, "prompt_tokens": 1009,
         "device_hit_tokens": 128, "storage_hit_tokens": 256, "computed_tokens": 7},
        {"id": "b", "arrival_ns": 2 * S, "first_token_ns": 3 * S, "prompt_tokens": 1009},
    ])  # fmt: skip
    filled = fill_in(requests, host)
    assert filled["device_hit_tokens"].tolist() == [128, 0]
    assert filled["computed_tokens"].tolist() == [7, -1], "what storage gave is not known"


@pytest.mark.parametrize(
    ("name", "counted", "seen", "said"),
    [
        ("read_bytes", 4099, 4099, "vllm counted 4,099 bytes read, and so did kvprobe"),
        ("read_bytes", 4099, 5003, "kvprobe saw 5,003 in the window"),
        ("chunk_hits", 401, 401, "vllm counted 401 files found, and so did kvprobe"),
        ("chunk_hits", 401, 787, "787 tests of files that were there, those before stores"),
        ("chunk_hits", 401, 397, "kvprobe saw 397 in the window"),
        ("prompt_tokens", 5, None, None),
    ],
)
def test_counters_stand_beside_own_figures(
    node: FixedTables, name: str, counted: int, seen: int | None, said: str | None
) -> None:
    total = EngineTotal("vllm", name, counted, seen, 7)
    told = notes.compared(replace(correlate(node), totals=(total,)))
    assert (said is None and not told) or (said is not None and said in told[0])
