"""The distance between the wall clock and CLOCK_MONOTONIC, and whether it jumped.

Engines log wall time, the kernel stamps CLOCK_MONOTONIC. Both clocks are slewed together, so their
distance changes only when somebody sets the wall clock, at a leap second, and by a suspend.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

ROUNDS = 20
"""Readings per sample; the tightest counts, so one undisturbed reading is enough."""


@dataclass(frozen=True)
class ClockSample:
    """Wall clock minus CLOCK_MONOTONIC at ``at_ns`` (CLOCK_MONOTONIC).

    The true distance is within ``uncertainty_ns`` of ``offset_ns``.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def sample_clocks(rounds: int = ROUNDS) -> ClockSample:
    """Read monotonic, wall, monotonic several times and keep the round that took least."""
    best: ClockSample | None = None
    for _ in range(rounds):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        wall = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        uncertainty = (after - before + 1) // 2
        if best is None or uncertainty < best.uncertainty_ns:
            best = ClockSample(after, wall - (before + after) // 2, uncertainty)
    if best is None:
        raise ValueError("at least one round is needed")
    return best


def clock_step_ns(before: ClockSample, after: ClockSample) -> int:
    """How far the wall clock jumped between two samples; 0 where their uncertainty explains it."""
    moved = after.offset_ns - before.offset_ns
    return moved if abs(moved) > before.uncertainty_ns + after.uncertainty_ns else 0
