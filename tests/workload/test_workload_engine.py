"""The scheduler behaves as stated: who waits for what, in what order, at what depth."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvprobe.engines import vllm
from kvprobe.signals.events import EventSignal
from kvprobe.workload.prefill import PrefillCost
from kvprobe.workload.prompts import Synthetic
from kvprobe.workload.run import Config, run_workload
from kvprobe.workload.shapes import preset

from .conftest import REQUESTS, UNIT_TOKENS, Ran, Run

UNIT = UNIT_TOKENS * 2048
pytestmark = pytest.mark.root


def by_request(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["start_ns"])):
        groups[row["id"]].append(row)
    return groups


def deepest(rows: list[dict[str, Any]]) -> int:
    """Most rows that are in progress at once."""
    ends = sorted([(r["start_ns"], 1) for r in rows] + [(r["end_ns"], -1) for r in rows])
    depth = most = 0
    for _, change in ends:
        depth += change
        most = max(most, depth)
    return most


def check_requests(ran: Ran) -> None:
    """What holds for each request, whatever the settings."""
    assert len(ran.requests) == ran.summary["requests"] == REQUESTS
    assert ran.ignored == 0
    reads = by_request(ran.during("read"))
    for name, row in ran.requests.items():
        times = [row[f"{what}_ns"] for what in ("arrival", "scheduled", "prefill_start",
                                                "prefill_end", "first_token")]  # fmt: skip
        assert times == sorted(times) and times[0] > 0
        parts = [row[f"{what}_tokens"] for what in ("device_hit", "storage_hit", "computed")]
        assert sum(parts) == row["prompt_tokens"]
        assert row["computed_tokens"] >= 1, "the last token is always computed"
        mine = [read for read in reads[name] if read["result"] == UNIT]
        whole = len(mine) == len(reads[name])
        assert row["storage_hit_tokens"] == len(mine) * UNIT_TOKENS or not whole
        for read in mine:
            assert times[0] < read["start_ns"] and read["end_ns"] < row["prefill_start_ns"]


def test_reads_of_a_request_go_one_after_another_on_one_thread(run: Run) -> None:
    ran = run(concurrency=4)
    check_requests(ran)
    for rows in by_request(ran.during("read")).values():
        assert deepest(rows) == 1
        assert len({row["tid"] for row in rows}) == 1


@pytest.mark.parametrize("io", ["sync", "io_uring"])
def test_reads_in_flight_are_as_many_as_asked_for(run: Run, io: str) -> None:
    ran = run(reads_in_flight=4, io=io, warm="all")
    check_requests(ran)
    groups = by_request(ran.during("read"))
    assert max(deepest(rows) for rows in groups.values()) == 4
    threads = [len({row["tid"] for row in rows}) for rows in groups.values()]
    assert max(threads) == (1 if io == "io_uring" else 4)
    assert [row["key"] for row in ran.truth if row["kind"] == "open" and row["why"] == "load"][
        : len(next(iter(groups.values())))
    ], "chunks are opened in order"


def test_lookups_stop_at_the_first_miss_or_test_every_chunk(run: Run) -> None:
    ran = run()
    for rows in by_request(ran.during("lookup", why="lookup")).values():
        assert [row["result"] for row in rows[:-1]] == [0] * (len(rows) - 1)
    every = run(lookup_every=True, store=False)
    for name, rows in by_request(every.during("lookup", why="lookup")).items():
        assert len(rows) == (every.requests[name]["prompt_tokens"] - 1) // UNIT_TOKENS
    check_requests(every)


def test_keys_in_the_events_are_those_of_the_files(run: Run) -> None:
    ran = run(emit_keys=True)
    named: dict[str, list[str]] = defaultdict(list)
    for row in ran.keys:
        assert row["position"] == len(named[row["request_id"]])
        named[row["request_id"]].append(row["key"])
    for name, rows in by_request(ran.during("read")).items():
        assert [row["key"] for row in rows] == named[name][: len(rows)]
    assert run(emit_keys=False).keys == []


def test_recompute_looks_up_but_never_reads(run: Run) -> None:
    ran = run(restore_from_tokens=1 << 40)
    check_requests(ran)
    assert not ran.during("read")
    assert any(row["result"] == 0 for row in ran.during("lookup", why="lookup"))
    assert ran.summary["tokens"]["found"] > 0 == ran.summary["tokens"]["restored"]


def test_threshold_restores_long_prefixes_only(run: Run) -> None:
    ran = run(restore_from_tokens=10 * UNIT_TOKENS)
    check_requests(ran)
    hits = {row["storage_hit_tokens"] for row in ran.requests.values()}
    assert 0 in hits and min(hits - {0}) >= 10 * UNIT_TOKENS
    found: dict[str, int] = defaultdict(int)
    for row in ran.during("lookup", why="lookup"):
        found[row["id"]] += row["result"] == 0
    for name, row in ran.requests.items():
        chunks = found[name] if found[name] >= 10 else 0
        assert row["storage_hit_tokens"] == chunks * UNIT_TOKENS


def test_prefetch_restores_while_requests_wait_for_a_slot(run: Run) -> None:
    for prefetch in (False, True):
        ran = run(concurrency=5, slots=1, prefetch=prefetch, warm="all")
        check_requests(ran)
        reads = by_request(ran.during("read"))
        early = [
            name for name, rows in reads.items()
            if rows[0]["start_ns"] < ran.requests[name]["scheduled_ns"]
        ]  # fmt: skip
        assert (len(early) > REQUESTS / 2) if prefetch else (early == [])


def test_slots_bound_what_is_scheduled(run: Run) -> None:
    ran = run(concurrency=7, slots=2, cost=PrefillCost.parse("3,0,0"))
    spans = [
        {"start_ns": row["scheduled_ns"], "end_ns": row["first_token_ns"]}
        for row in ran.requests.values()
    ]
    assert deepest(spans) == 2
    arrived = [
        {"start_ns": row["arrival_ns"], "end_ns": row["first_token_ns"]}
        for row in ran.requests.values()
    ]
    assert deepest(arrived) == 7


def test_open_loop_follows_its_clock(run: Run) -> None:
    ran = run(rate=113.0)
    check_requests(ran)
    arrivals = sorted(row["arrival_ns"] for row in ran.requests.values())
    mean_gap = (arrivals[-1] - arrivals[0]) / (REQUESTS - 1) / 1e9
    assert 0.5 / 113 < mean_gap < 2 / 113
    again = run(rate=113.0)
    other = sorted(row["arrival_ns"] for row in again.requests.values())
    for mine, theirs in zip(arrivals, other, strict=True):
        assert abs((mine - arrivals[0]) - (theirs - other[0])) < 100_000_000


def test_device_cache_answers_before_storage(run: Run) -> None:
    ran = run(device_cache_tokens=100_000)
    check_requests(ran)
    assert ran.summary["tokens"]["device"] > 0
    looked_up = {row["id"] for row in ran.during("lookup", why="lookup")}
    whole = [
        n
        for n, r in ran.requests.items()
        if r["device_hit_tokens"] == (r["prompt_tokens"] - 1) // UNIT_TOKENS * UNIT_TOKENS
    ]
    assert not looked_up & set(whole)  # fmt: skip
    small = run(device_cache_tokens=5 * UNIT_TOKENS, warm="all")
    assert max(r["device_hit_tokens"] for r in small.requests.values()) <= 5 * UNIT_TOKENS


def test_modelled_prefill_takes_what_the_formula_says(run: Run) -> None:
    cost = PrefillCost.parse("1,2,300")
    assert cost.ns(7, 11) == 1_000_000 + 2_000 * 7 + 300 * 7 * (11 + 3.5)
    ran = run(cost=cost)
    over = []
    for row in ran.requests.values():
        new = row["computed_tokens"]
        context = row["prompt_tokens"] - new
        seconds = 1e-3 + 2e-6 * new + 300e-9 * new * (context + new / 2)
        took_ns = row["prefill_end_ns"] - row["prefill_start_ns"]
        assert took_ns >= seconds * 1e9 - 1000
        over.append(took_ns - seconds * 1e9)
    assert statistics.median(over) < 2_000_000


def test_blas_prefill_is_work(config: Config, run: Run) -> None:
    import time

    begun = time.process_time()
    ran = run(prefill="blas", cost=PrefillCost.parse("20,0,0"))
    assert ran.summary["prefill"] == "cpu"
    assert time.process_time() - begun > REQUESTS * 0.02 * 0.5


def test_eviction_keeps_to_the_capacity(run: Run, folder: str) -> None:
    ran = run(capacity_bytes=37 * UNIT + UNIT // 2, warm="none", concurrency=4)
    check_requests(ran)
    files = list(Path(folder).rglob("*.bin"))
    assert len(files) == 37 == ran.summary["chunks"]["kept"]
    evicted = sum(row["result"] == 0 for row in ran.during("unlink"))
    assert ran.summary["operations"]["rename"] - evicted == 37
    later = run(capacity_bytes=11 * UNIT, warm="none")
    assert len(list(Path(folder).rglob("*.bin"))) == 11
    check_requests(later)


def test_damaged_chunks_are_seen_and_computed_again(run: Run, config: Config, folder: str) -> None:
    one = replace(config.synthetic or Synthetic(1), requests=REQUESTS, prefixes=1)
    run(synthetic=one, warm="reused", warm_only=True)
    ran = run(synthetic=one, warm="none", store=False)
    keys = [row["key"] for row in ran.during("read") if row["id"] == "req-0"]
    base = str(ran.summary["base"])
    swapped, short = (Path(vllm.chunk_path(base, keys[n])) for n in (3, 5))
    with swapped.open("r+b") as file:
        file.write(b"\0" * 32)
    with short.open("r+b") as file:
        file.truncate(4096)
    again = run(synthetic=one, warm="none", store=False)
    with_swapped = sum(row["key"] == keys[3] for row in again.during("read"))
    with_short = sum(row["key"] == keys[5] for row in again.during("read"))
    assert again.summary["corrupt_reads"] == with_swapped > 1
    assert again.summary["failed_reads"] == with_short > 1
    assert again.requests["req-0"]["storage_hit_tokens"] == 5 * UNIT_TOKENS


@pytest.mark.parametrize("name", ["tiny", "custom"])
def test_the_engine_tells_the_arithmetic_of_its_model(
    config: Config, tmp_path: Path, name: str
) -> None:
    shape = preset(name, layers=3, kv_heads=2, head_dim=64)
    events = str(tmp_path / "events.jsonl")
    chosen = replace(config, shape=shape, unit_tokens=16, events=events, warm_only=True)
    run_workload(chosen, lambda *_: None)
    engine = EventSignal(events).close().engine
    assert engine is not None and engine.bytes_per_token == shape.stored_bytes_per_token
    assert engine.arithmetic == shape.arithmetic
    assert (engine.arithmetic is None) == (name == "custom")
