"""The main promise on real I/O: what kvprobe says happened is what the workload did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvprobe.correlator import CLASSES
from kvprobe.schema import LookupKind
from kvprobe.workload.scratch import Scratch

from .conftest import Run, right_share, traced

pytestmark = pytest.mark.root
THREAD = CLASSES.index("thread")

CASES = {
    "direct-1": "--requests 97 --concurrency 1",
    "direct-4": "--requests 151 --concurrency 4",
    "direct-16": "--requests 211 --concurrency 16",
    "buffered-1": "--requests 97 --concurrency 1 --buffered",
    "buffered-4": "--requests 151 --concurrency 4 --buffered",
    "buffered-16": "--requests 211 --concurrency 16 --buffered",
    "uring-direct-1": "--requests 97 --concurrency 1 --io io_uring --reads-in-flight 4",
    "uring-direct-4": "--requests 151 --concurrency 4 --io io_uring --reads-in-flight 4",
    "uring-direct-16": "--requests 211 --concurrency 16 --io io_uring --reads-in-flight 4",
    "uring-buffered-1": "--requests 97 --concurrency 1 --io io_uring --reads-in-flight 4"
    " --buffered",
    "uring-buffered-16": "--requests 211 --concurrency 16 --io io_uring --reads-in-flight 4"
    " --buffered",
    "threads-direct-16": "--requests 211 --concurrency 16 --reads-in-flight 4",
}


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest, disk: Scratch, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """One traced run per case."""
    folder = tmp_path_factory.mktemp("truth")
    return traced(disk, folder, request.param, *CASES[request.param].split())


def test_nothing_was_lost(run: Run) -> None:
    assert run.capture.manifest.complete
    assert all(loss.lost == 0 == loss.thinned for loss in run.capture.manifest.losses.values())


@pytest.mark.parametrize("kind", ["read", "write"])
def test_operations_and_bytes_are_exact(run: Run, kind: str) -> None:
    ops, told = run.ledger.ops, run.did(kind)
    mine = (ops["kind"] >= 64) == (kind == "write")
    assert len(told) > 97
    assert int(mine.sum()) == len(told)
    assert int(ops["result"][mine].sum()) == sum(row["result"] for row in told)


def test_lookups_are_exact(run: Run) -> None:
    told = run.did("lookup")
    lookups = run.capture.frame("lookups")
    known = np.array([key is not None for key in lookups["kv_key"]])
    mine = known & np.isin(lookups["kind"], (LookupKind.ACCESS, LookupKind.STAT))
    assert int(mine.sum()) == len(told)
    assert int((lookups["result"][mine] >= 0).sum()) == sum(row["result"] >= 0 for row in told)


def test_attribution_is_right(run: Run, request: pytest.FixtureRequest) -> None:
    alone = run.ledger.engine is not None and "-1]" in request.node.name
    assert right_share(run, THREAD) >= (0.99 if alone else 0.95)


def test_direct_reads_are_tied_to_their_commands(run: Run) -> None:
    ops, block = run.ledger.ops, run.ledger.block
    direct = (ops["kind"] < 64) & (ops["direct"] == 1) & (ops["result"] > 0)
    if not direct.any():
        assert not (ops["direct"] == 1).any()
        return
    reads = (block["owner"] >= 0) & (block["op"] == 0)
    served = np.bincount(block["owner"][reads], block["bytes"][reads], len(ops["kind"]))
    assert np.array_equal(served[direct], ops["result"][direct])


def test_parts_sum_to_their_whole(run: Run) -> None:
    assert len(run.ledger.accounts) >= 97
    for account in run.ledger.accounts:
        spans, restore = account.spans, account.restore
        assert spans is not None and account.ttft_ns is not None
        assert sum(vars(spans).values()) == account.ttft_ns
        assert min(vars(spans).values()) >= 0
        if restore is not None:
            parts = (restore.device_ns, restore.block_queue_ns, restore.software_ns)
            assert sum(parts) + restore.idle_ns == restore.exposed_ns == spans.restore_ns
            assert min(*parts, restore.idle_ns) >= 0
        if account.storage_hit_tokens:
            assert restore is not None
            assert restore.bytes == account.storage_hit_tokens * 4096


def test_block_bytes_equal_the_kernels_counters(disk: Scratch, tmp_path: Path) -> None:
    run = traced(
        disk,
        tmp_path,
        "whole-device",
        "--requests=151",
        "--concurrency=4",
        "--no-store",
        capture=("--device", str(disk.name)),
    )
    block = run.capture.frame("block")
    reads = (block["device"] == disk.device) & (block["op"] == 0)
    told = sum(row["result"] for row in run.did("read"))
    assert told > 0
    assert int(block["bytes"][reads].sum()) == pytest.approx(run.diskstats["read_bytes"], rel=1e-3)
    assert int(block["bytes"][reads].sum()) >= told
