"""Operations to requests: the simulated node's truth, and what is said where it is not known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.capture.frames import frame_from_dicts
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import CLASSES, Ledger, correlate
from kvprobe.model import EngineFacts, Loss
from kvprobe.schema import TABLES, LookupKind, OpKind
from tests.correlator.rows import block, lookup, op, opened
from tests.correlator.simulate import UNIT_BYTES, UNIT_TOKENS, Node

Rows = list[dict[str, Any]]
SEEDS = (3, 5, 7)


def run(*, seed: int = 3, concurrency: int = 4, **shape: Any) -> Node:
    return Node(seed, concurrency, requests=shape.pop("requests", 131), **shape).run()


def sums_hold(ledger: Ledger) -> None:
    """What must be true of every ledger, however good the attribution is."""
    ops = ledger.ops
    read = (ops["kind"] < OpKind.WRITE) & (ops["result"] > 0)
    assert sum(ledger.attributed_bytes.values()) == ops["result"][read].sum()
    for account in ledger.accounts:
        total = sum(account.attribution.values())
        has_bytes = account.restore is not None and account.restore.bytes > 0
        assert total == pytest.approx(1 if has_bytes else 0, abs=1e-12)
    if not ledger.attributed_bytes["none"]:
        given = sum(a.restore.bytes for a in ledger.accounts if a.restore)
        shared = sum(a.attribution["shared"] > 0 for a in ledger.accounts)
        assert abs(given - ops["result"][read].sum()) <= shared  # a rounding each
    for account in ledger.accounts:
        if account.spans is not None and account.restore is not None:
            assert account.restore.exposed_ns == account.spans.restore_ns


@pytest.mark.parametrize("fan_out", [1, 4, 8])
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_bytes_find_their_request(concurrency: int, fan_out: int) -> None:
    bound = 0.999 if concurrency == 1 or fan_out == 1 else 0.96
    for seed in SEEDS:
        node = run(seed=seed, concurrency=concurrency, fan_out=fan_out)
        ledger = correlate(node.capture())
        assert node.right_share(ledger) >= bound
        sums_hold(ledger)


@pytest.mark.parametrize("fan_out", [2, 8])
def test_bytes_of_an_io_uring_find_their_request(fan_out: int) -> None:
    for pieces in (1, 4):
        node = run(concurrency=16, fan_out=fan_out, uring=True, pieces=pieces)
        assert node.right_share(correlate(node.capture())) == 1.0


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_files_read_in_pieces(concurrency: int) -> None:
    node = run(concurrency=concurrency, pieces=4)
    assert node.right_share(correlate(node.capture())) == 1.0


@pytest.mark.parametrize("concurrency", [1, 16])
def test_more_jobs_than_threads(concurrency: int) -> None:
    node = run(concurrency=concurrency, loaders=2)
    assert node.right_share(correlate(node.capture())) >= 0.999


@pytest.mark.parametrize("concurrency", [4, 16])
@pytest.mark.parametrize("shape", [{"full_hit_share": 0.5}, {"cold_share": 0.3}], ids=str)
def test_prompts_without_a_miss_or_without_a_hit(concurrency: int, shape: dict[str, Any]) -> None:
    node = run(concurrency=concurrency, **shape)
    assert node.right_share(correlate(node.capture())) >= 0.99


def test_stores_do_not_disturb_and_find_their_request() -> None:
    node = run(concurrency=4, stores=True, requests=61)
    ledger = correlate(node.capture())
    assert node.right_share(ledger) == 1.0
    ids = [a.id for a in ledger.accounts]
    ops = ledger.ops
    writes = np.flatnonzero(ops["kind"] >= OpKind.WRITE)
    assert len(writes) > 1000
    # The first new chunk of a prompt was looked up and missed: its store is known for sure.
    known = [w for w in writes if ops["class"][w] == CLASSES.index("thread")]
    assert len(known) == sum(key.endswith("c0") for key in ops["key"][writes])
    assert all(ids[ops["request"][w]] == node.truth[w] for w in known)
    assert set(ops["class"][writes].tolist()) <= {CLASSES.index("thread"), CLASSES.index("shared")}


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_keys_that_the_engine_names_make_it_exact(concurrency: int) -> None:
    for seed in SEEDS:
        node = run(seed=seed, concurrency=concurrency, named=True)
        ledger = correlate(node.capture())
        assert node.right_share(ledger, worst="exact") >= 0.999
        sums_hold(ledger)


def test_named_keys_need_no_lookups() -> None:
    node = run(concurrency=16, named=True)
    node.tables["lookups"] = [r for r in node.tables["lookups"] if r["kind"] == LookupKind.OPEN]
    assert node.right_share(correlate(node.capture()), worst="exact") >= 0.999


def test_keys_in_other_words_than_the_file_names_do_not_harm() -> None:
    node = run(concurrency=4, named=True)
    for row in node.tables["keys"]:
        row["key"] = "0x" + row["key"]
    ledger = correlate(node.capture())
    assert node.right_share(ledger, best="thread") == 1.0


def without_lookups(node: Node) -> FixedTables:
    node.tables["lookups"] = [r for r in node.tables["lookups"] if r["kind"] == LookupKind.OPEN]
    return node.capture()


def test_without_lookups_a_lone_request_is_known_by_its_window() -> None:
    node = run(concurrency=1)
    ledger = correlate(without_lookups(node))
    assert node.right_share(ledger, best="window", worst="window") == 1.0


def test_without_lookups_requests_that_wait_together_share() -> None:
    node = run(concurrency=4)
    ledger = correlate(without_lookups(node))
    sums_hold(ledger)
    amount = ledger.attributed_bytes
    assert amount["exact"] == amount["thread"] == amount["none"] == 0
    assert amount["shared"] > amount["window"] > 0
    shares = [a.attribution for a in ledger.accounts if a.restore]
    assert any(0 < share["shared"] < 1 for share in shares)


def test_a_shared_read_is_split_by_the_bytes_each_request_expected() -> None:
    requests = [request("x", 1000, 9000, 48), request("y", 1001, 9500, 16)]
    ledger = correlate(tables(requests, [op(2000, 3000)], [opened("/kv/a.bin", 10, 7)]))
    first, second = (a.restore for a in ledger.accounts)
    assert first and second
    assert (first.bytes, second.bytes) == (3072, 1024)
    assert ledger.attributed_bytes["shared"] == 4096


def test_nobody_waiting_is_none() -> None:
    requests = [request("x", 1000, 9000, 48), request("cold", 1000, 50_000, 0)]
    ledger = correlate(
        tables(requests, [op(500, 990), op(9500, 9900)], [opened("/kv/a.bin", 10, 7)])
    )
    assert ledger.attributed_bytes["none"] == 8192
    assert ledger.ops["request"].tolist() == [-1, -1]


def test_failed_and_empty_reads_belong_to_nobody() -> None:
    ops = [op(2000, 2100, result=-5), op(2200, 2300, result=0), op(2400, 2500)]
    ledger = correlate(tables([request("x", 1000, 9000, 48)], ops, [opened("/kv/a.bin", 10, 7)]))
    assert ledger.attributed_bytes == {**dict.fromkeys(CLASSES, 0), "window": 4096}
    assert ledger.ops["request"].tolist() == [-1, -1, 0]
    sums_hold(ledger)


def test_traffic_that_is_not_kv_cache_is_left_out() -> None:
    lookups = [opened("/kv/a.bin", 10, 7), opened("/var/lib/db", 10, 8)]
    ledger = correlate(
        tables([request("x", 1000, 9000, 48)], [op(2000, 2100), op(2000, 2100, inode=8)], lookups)
    )
    assert len(ledger.ops["key"]) == 1
    assert ledger.attributed_bytes["window"] == 4096


def test_unknown_unit_still_follows_threads() -> None:
    for concurrency in (1, 4):
        node = run(concurrency=concurrency)
        ledger = correlate(node.capture(unit_tokens=None, unit_bytes=None, reads_in_flight=None))
        assert node.right_share(ledger) >= 0.99


def test_lost_lookups_cost_little_more_than_what_was_lost() -> None:
    node = run(concurrency=4)
    rng = np.random.default_rng(11)
    lookups = node.tables["lookups"]
    kept = [r for r in lookups if r["kind"] == LookupKind.OPEN or rng.random() > 0.02]
    lost = len(lookups) - len(kept)
    assert lost > 40
    node.tables["lookups"] = kept
    tables = node.capture()
    tables.manifest = replace(tables.manifest, losses={"lookups": Loss(len(kept), lost)})
    ledger = correlate(tables)
    assert node.right_share(ledger) > 0.97
    sums_hold(ledger)


def jobs(
    requests: Rows, asked: list[tuple[int, str]], reads: list[tuple[int, str, int]]
) -> list[tuple[str, str]]:
    """Request and class of each read; lookups are (time, key), reads (time, key, thread)."""
    inodes = {key: place for place, key in enumerate(sorted({key for _, key, _ in reads}))}
    lookups = [
        lookup(LookupKind.ACCESS, f"/kv/{key}.bin", at, result=-2 if key.endswith("-") else 0)
        for at, key in asked
    ]
    ops = []
    for at, key, tid in reads:
        lookups.append(opened(f"/kv/{key}.bin", at - 10, inodes[key], tid=tid))
        ops.append(op(at, at + 50, inode=inodes[key], tid=tid))
    ledger = correlate(tables(requests, ops, lookups))
    rows = zip(ledger.ops["request"], ledger.ops["class"], strict=True)
    return [(ledger.accounts[r].id, CLASSES[level]) for r, level in rows]


def test_a_key_read_again_by_a_thread_is_another_job() -> None:
    requests = [request("x", 1000, 9000, 16), request("y", 1001, 9000, 16)]
    asked = [(1100, "a0"), (1110, "x1-"), (1200, "a0"), (1210, "y1-")]
    reads = [(2000, "a0", 21), (2100, "a0", 21)]
    assert jobs(requests, asked, reads) == [("x", "thread"), ("y", "thread")]


def test_a_read_between_two_of_a_job_is_of_that_job_though_its_lookup_was_lost() -> None:
    requests = [request("x", 1000, 9000, 48), request("y", 1001, 9000, 48)]
    asked = [(1100, "a0"), (1110, "a2"), (1200, "b0"), (1210, "b1"), (1220, "b2")]
    reads = [(2000 + 100 * i, f"a{i}", 21) for i in range(3)]
    assert jobs(requests, asked, reads) == [("x", "thread")] * 3


def test_a_job_is_read_to_its_end() -> None:
    # Both prompts begin alike; nothing is read for the older and longer one.
    requests = [request("x", 1000, 9000, 80), request("y", 1001, 9000, 32)]
    asked = [*((1100 + i, f"a{i}") for i in range(5)), (1200, "a0"), (1201, "a1")]
    reads = [(2000, "a0", 21), (2100, "a1", 21)]
    assert jobs(requests, asked, reads) == [("y", "thread")] * 2


def test_equal_prompts_at_once() -> None:
    requests, lookups, ops, truth = [], [], [], []
    for number in range(29):
        arrival = 1_000_000 * number
        name = f"r{number}"
        requests.append(request(name, arrival, arrival + 2_900_000, 48))
        at = arrival + 10_000
        for chunk in range(3):
            lookups.append(lookup(LookupKind.ACCESS, f"/kv/a{chunk}.bin", at + 9000 * chunk))
        for chunk in range(3):
            start = at + 100_000 + 900_000 * chunk
            lookups.append(opened(f"/kv/a{chunk}.bin", start - 100, chunk, tid=50 + number % 3))
            ops.append(op(start, start + 800_000, inode=chunk, tid=50 + number % 3))
            truth.append(name)
    ledger = correlate(tables(requests, ops, lookups))
    assert [ledger.accounts[r].id for r in ledger.ops["request"]] == truth
    assert ledger.attributed_bytes["thread"] == 4096 * len(ops)


def test_requests_that_never_finish() -> None:
    node = run(concurrency=4)
    for row in node.tables["requests"][::7]:
        row["first_token_ns"] = row["prefill_start_ns"] = row["prefill_end_ns"] = None
    ledger = correlate(node.capture())
    assert node.right_share(ledger) >= 0.99
    assert sum(a.ttft_ns is None for a in ledger.accounts) == 19
    assert all(a.spans is None for a in ledger.accounts if a.ttft_ns is None)
    sums_hold(ledger)


def test_requests_with_one_id() -> None:
    node = run(concurrency=4, named=True)
    for table, column in (("requests", "id"), ("keys", "request_id")):
        for row in node.tables[table]:
            row[column] = f"r{int(row[column][1:]) // 2}"
    node.truth = [f"r{int(name[1:]) // 2}" for name in node.truth]
    ledger = correlate(node.capture())
    assert len(ledger.accounts) == 131
    assert node.right_share(ledger, worst="exact") >= 0.99


@pytest.mark.parametrize("missing", ["requests", "ops", "lookups", "block"])
def test_any_table_may_be_empty(missing: str) -> None:
    node = run(concurrency=4, requests=29)
    tables = node.capture()
    kept = {n: tables.frame(n) for n in TABLES if n != missing}
    sums_hold(correlate(FixedTables(tables.manifest, kept)))
    sums_hold(correlate(FixedTables(replace(tables.manifest, engine=None), kept)))


def test_nothing_at_all() -> None:
    manifest = Manifest("test", "empty", 0, 10, Clock(0))
    ledger = correlate(FixedTables(manifest, {}))
    assert not ledger.accounts
    assert not ledger.devices
    assert ledger.restore is None
    assert ledger.read_ahead is None


def test_throttled_requests_count_as_queue_from_the_start_of_their_operation() -> None:
    rows = [block(2700, 2900, held=1, tid=901, issued_ns=2750), block(2950, 2990)]
    ledger = correlate(
        tables([request("x", 1000, 9000, 48)], [op(2000, 3000)], [opened("/kv/a.bin", 10, 7)], rows)
    )
    restore = ledger.accounts[0].restore
    assert restore
    assert (restore.device_ns, restore.block_queue_ns) == (150 + 40, 750)
    assert (restore.software_ns, restore.idle_ns) == (60, 0)


def test_the_idle_device_before_a_restore() -> None:
    other = {"inode": 8, "tid": 31}
    rows = [
        block(1500, 1600, **other),
        block(1550, 1700, **other),
        block(1990, 2500),
        block(1100, 1900, device=99, **other),
    ]
    ledger = correlate(
        tables([request("x", 1000, 9000, 48)], [op(1980, 3000)], [opened("/kv/a.bin", 10, 7)], rows)
    )
    assert ledger.accounts[0].device_before_read_ns == 980 - 200


def test_restores_at_once_as_a_restoring_request_sees_them() -> None:
    # x restores alone for 1000, with y for 3000; y alone for 500.
    ops = [op(2000, 6000, tid=1, direct=0), op(3000, 6500, inode=8, tid=2, direct=0)]
    requests = [request("x", 1000, 6001, 16), request("y", 2900, 6501, 16)]
    lookups = [
        lookup(LookupKind.ACCESS, "/kv/a.bin", 1100),
        lookup(LookupKind.ACCESS, "/kv/b.bin", 2_902, tid=12),
        opened("/kv/a.bin", 1500, 7),
        opened("/kv/b.bin", 2950, 8),
    ]
    ledger = correlate(tables(requests, ops, lookups))
    assert ledger.restore
    assert ledger.restore.restoring_at_once == pytest.approx((1000 + 4 * 3000 + 500) / 7500)


def request(name: str, arrival: int, prefill: int, hit_tokens: int) -> dict[str, Any]:
    return {
        "id": name,
        "arrival_ns": arrival,
        "scheduled_ns": arrival,
        "prefill_start_ns": prefill,
        "prefill_end_ns": prefill + 200,
        "first_token_ns": prefill + 210,
        "prompt_tokens": hit_tokens + 5,
        "device_hit_tokens": 0,
        "storage_hit_tokens": hit_tokens,
        "computed_tokens": 5,
    }


def tables(requests: Rows, ops: Rows, lookups: Rows, rows: Rows | None = None) -> FixedTables:
    """Hand-made tables of an engine with one chunk in a file."""
    given = {"requests": requests, "ops": ops, "lookups": lookups, "block": rows or []}
    frames = {n: frame_from_dicts(TABLES[n], table) for n, table in given.items()}
    engine = EngineFacts("test", unit_tokens=UNIT_TOKENS, unit_bytes=UNIT_BYTES)
    return FixedTables(Manifest("test", "hand", 0, 100_000_000, Clock(0), engine=engine), frames)
