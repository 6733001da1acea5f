"""vLLM counts the load from storage as time in the queue; kvprobe says what it is."""

from __future__ import annotations

import statistics

import pytest

from kvprobe.correlator import Ledger
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
    shares = []
    for account in ledger.accounts:
        queued_ns = fs_tier.tee.latencies()[account.id]["time_in_queue"] * 1e9
        assert account.spans is not None
        spans, slow_ns = account.spans, account.restore.bytes / SLOW_BYTES_PER_S * 1e9  # type: ignore[union-attr]
        assert queued_ns > 0.8 * slow_ns, "vLLM has the load in its queue"
        assert spans.restore_ns > 0.8 * slow_ns
        shares.append((spans.restore_ns + spans.lookup_ns + spans.lookup_to_read_ns) / queued_ns)
        assert spans.engine_queue_ns < 0.25 * queued_ns
    assert len(shares) == PROMPTS
    assert 0.85 < statistics.median(shares) < 1.05


def test_slow_device_is_where_the_time_went(ledger: Ledger) -> None:
    for account in ledger.accounts:
        restore = account.restore
        assert restore is not None
        assert restore.device_ns is not None
        assert restore.block_queue_ns is not None
        assert restore.device_ns + restore.block_queue_ns > 0.8 * restore.exposed_ns
