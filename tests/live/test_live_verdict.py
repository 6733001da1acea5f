"""The same prompts on the same server: restoring pays from a fast disk and not from a slow one."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

from kvprobe.correlator import Ledger
from kvprobe.model import Verdict
from kvprobe.workload.scratch import Scratch
from kvprobe.workload.throttle import Limits, throttle
from tests.live.engine_client import Ask, tokens
from tests.live.engine_node import PROMPTS, FsTierNode
from tests.live.tiny_model import BYTES_PER_TOKEN

SLOW_BYTES_PER_S = 20 << 20
COMPUTED = 31
LENGTHS = range(300, 3200)
ROUNDS = 2


@pytest.fixture(scope="module")
def fast(fs_tier: FsTierNode) -> Ledger:
    return _ledger(fs_tier, None, 20_000)


@pytest.fixture(scope="module")
def slow(fs_tier: FsTierNode, disk: Scratch, fast: Ledger) -> Ledger:
    assert disk.device is not None
    return _ledger(fs_tier, disk.device, 30_000)


def _ledger(node: FsTierNode, slow_device: int | None, first_seed: int) -> Ledger:
    """Every prompt from storage, and some that are computed, as much as both models need."""
    source = random.Random(13)
    computed = [
        Ask(f"v{n}-{n}", tokens(source.choice(LENGTHS), n), recompute=True)
        for n in range(first_seed, first_seed + COMPUTED)
    ]
    limits = Limits(read_bytes_per_s=SLOW_BYTES_PER_S)
    slowed = (
        nullcontext()
        if slow_device is None
        else throttle(slow_device, limits, node.server.process.members())
    )
    with node.look() as look, slowed:
        look.answers += node.client.ask_all(computed)
        for _ in range(ROUNDS):
            look.answers += node.client.ask_all(node.asks(range(PROMPTS)))
    return look.seen.ledger


def _verdicts(ledger: Ledger) -> list[Verdict]:
    return [a.verdict for a in ledger.accounts if a.restore is not None and a.restore.bytes]


def test_restoring_won_from_the_fast_disk(fast: Ledger) -> None:
    verdicts = _verdicts(fast)
    assert len(verdicts) == ROUNDS * PROMPTS
    assert Verdict.RESTORE_LOST not in verdicts
    assert verdicts.count(Verdict.RESTORE_WON) > 0.8 * len(verdicts)


def test_restoring_lost_from_the_slow_disk(slow: Ledger) -> None:
    verdicts = _verdicts(slow)
    assert len(verdicts) == ROUNDS * PROMPTS
    # The first reads after a pause are not slow yet: a limit has credit.
    assert verdicts.count(Verdict.RESTORE_WON) < 0.1 * len(verdicts)
    assert verdicts.count(Verdict.RESTORE_LOST) > 0.6 * len(verdicts)


def test_break_even_lies_between(fast: Ledger, slow: Ledger) -> None:
    """Where both routes were measured, the two disks lie on either side of recomputing."""
    assert fast.break_even.curve
    assert slow.break_even.curve
    for quick, late in zip(fast.break_even.curve, slow.break_even.curve, strict=False):
        if min(quick.tokens, late.tokens) >= 1500:
            assert quick.restore.mid < quick.recompute.mid
            assert late.restore.mid > late.recompute.mid
    # In bytes a second: the disk that would do is faster than the slow one.
    point = fast.break_even.curve[-1]
    even_bytes_per_s = point.tokens * BYTES_PER_TOKEN / (point.recompute.mid / 1e9)
    quick_bytes_per_s = point.tokens * BYTES_PER_TOKEN / (point.restore.mid / 1e9)
    assert SLOW_BYTES_PER_S < even_bytes_per_s < quick_bytes_per_s
