"""vLLM counts the load from storage as time in the queue; kvprobe says what it is."""

from __future__ import annotations

import statistics

import pytest

from kvprobe.correlator import Ledger
from kvprobe.correlator.ledger import Account
from kvprobe.workload.scratch import Scratch
from kvprobe.workload.throttle import Limits, throttle
from tests.live.engine_node import PROMPTS, FsTierNode

SLOW_BYTES_PER_S = 20 << 20


@pytest.fixture(scope="module")
def ledger(fs_tier: FsTierNode, disk: Scratch) -> Ledger:
    """One request at a time, from a disk so slow that the load is most of the wait."""
    assert disk.device is not None
    limits = Limits(read_bytes_per_s=SLOW_BYTES_PER_S)
    with fs_tier.look() as look, throttle(disk.device, limits, fs_tier.server.process.members()):
        look.answers += fs_tier.client.ask_all(fs_tier.asks(range(PROMPTS)))
    return look.seen.ledger


def test_load_is_restore_and_not_queue(fs_tier: FsTierNode, ledger: Ledger) -> None:
    """In a server without other work the queue ends at once; what follows is look-up and load."""
    told = fs_tier.tee.latencies()
    found: list[float] = []
    for account in _restored(ledger):
        queued_ns = told[account.id]["time_in_queue"] * 1e9
        assert account.spans is not None
        spans = account.spans
        load_ns = spans.lookup_ns + spans.lookup_to_read_ns + spans.restore_ns
        assert load_ns <= 1.05 * queued_ns, "vLLM has all of the load in its queue"
        assert spans.engine_queue_ns < 0.5 * queued_ns
        found.append(load_ns / queued_ns)
    assert statistics.median(found) > 0.8


def test_slow_device_is_where_the_time_went(ledger: Ledger) -> None:
    """Each file waits in blk-throttle before its turn, or below it."""
    shares = []
    for account in _restored(ledger):
        restore = account.restore
        assert restore is not None
        assert restore.device_ns is not None
        assert restore.block_queue_ns is not None
        shares.append((restore.device_ns + restore.block_queue_ns) / restore.exposed_ns)
    assert statistics.median(shares) > 0.85


def _restored(ledger: Ledger) -> list[Account]:
    found = [a for a in ledger.accounts if a.restore is not None and a.restore.bytes]
    assert len(found) == PROMPTS
    return found
