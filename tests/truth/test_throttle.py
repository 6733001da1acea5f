"""A known delay below the file system must appear where it was injected: in the block queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvprobe.workload.scratch import Scratch
from kvprobe.workload.throttle import Limits, throttle

from .conftest import traced

pytestmark = pytest.mark.root
RATE = 19 * 2**20
# Without a wait between requests the rate limiter has no idle time to give back as a burst; with
# reads of 1 MiB its clock ticks are small beside the wait of one read.
OPTIONS = (
    *("--requests=5", "--concurrency=1", "--no-store", "--prefill-cost=0,0,0"),
    *("--unit-tokens=256", "--prompt-tokens=4096", "--prefixes=1"),
)


def test_a_rate_limit_is_block_queue_time(disk: Scratch, tmp_path: Path) -> None:
    assert disk.device is not None
    free = traced(disk, tmp_path, "free", *OPTIONS).ledger.restore
    with throttle(disk.device, Limits(read_bytes_per_s=RATE), [os.getpid()]):
        slow = traced(disk, tmp_path, "slow", *OPTIONS).ledger.restore
    assert free is not None and slow is not None
    assert slow.bytes == free.bytes > RATE  # over a second's worth, or it proves nothing
    allowed_ns = slow.bytes / RATE * 1e9
    assert slow.restore_ns == pytest.approx(allowed_ns, rel=0.05)
    injected_ns = allowed_ns - free.restore_ns
    assert slow.block_queue_ns == pytest.approx(injected_ns, rel=0.05)
    assert free.block_queue_ns < 0.2 * free.restore_ns
