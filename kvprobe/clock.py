"""The distance between the wall clock and CLOCK_MONOTONIC, and whether it jumped.

Engines log wall time, the kernel stamps CLOCK_MONOTONIC. Both clocks are slewed together, so their
distance changes only when somebody sets the wall clock, at a leap second, and by a suspend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

ROUNDS = 20
"""Readings per sample; the tightest counts, so one undisturbed reading is enough."""


class Moment(NamedTuple):
    """A point of CLOCK_MONOTONIC as well as it is known: it lies in [earliest_ns, latest_ns]."""

    earliest_ns: int
    latest_ns: int

    @property
    def middle_ns(self) -> int:
        """The best single value."""
        return (self.earliest_ns + self.latest_ns) // 2

    @property
    def uncertainty_ns(self) -> int:
        """How far the truth may be from ``middle_ns``."""
        return (self.latest_ns - self.earliest_ns + 1) // 2

    def later(self, ns: int) -> Moment:
        """The moment ``ns`` after this one."""
        return Moment(self.earliest_ns + ns, self.latest_ns + ns)


class ClockSample(NamedTuple):
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


def whole_ns(seconds: float) -> int:
    """Seconds as nanoseconds, no further off than the float itself; ``* 1e9`` may be 200 ns off.

    Raises:
        ValueError, OverflowError: ``seconds`` is no finite number.
    """
    whole = int(seconds)
    return whole * 1_000_000_000 + round((seconds - whole) * 1e9)


def clock_step_ns(before: ClockSample, after: ClockSample) -> int:
    """How far the wall clock jumped between two samples; 0 where their uncertainty explains it."""
    moved = after.offset_ns - before.offset_ns
    return moved if abs(moved) > before.uncertainty_ns + after.uncertainty_ns else 0


class WallClock:
    """Puts wall clock readings of this machine on CLOCK_MONOTONIC, over jumps of the wall clock.

    ``look`` is to be called about once a second, better before each use. A reading is converted by
    the distance that was in force when it was made: of all that were, as the reading itself does
    not say on which side of a jump it was taken. Where several fit, the moment spans them.
    """

    def __init__(self, sample: Callable[[], ClockSample] = sample_clocks) -> None:
        self._sample = sample
        self._epochs: list[_Epoch] = []
        self.look()

    def look(self) -> None:
        """Take in the distance as it is now."""
        now = self._sample()
        last = self._epochs[-1] if self._epochs else None
        if last is None or clock_step_ns(last.clock, now):
            self._epochs.append(_Epoch(last, now))
        else:
            last.seen_ns = now.at_ns
            last.clock = min(last.clock, now, key=lambda sample: sample.uncertainty_ns)

    @property
    def steps(self) -> int:
        """Jumps seen so far."""
        return len(self._epochs) - 1

    def moment(self, wall_ns: int, width_ns: int = 0) -> Moment:
        """When the wall clock showed ``wall_ns``, or some value less than ``width_ns`` above it."""
        if len(self._epochs) == 1:
            return self._epochs[0].moment(wall_ns, width_ns)
        whole = [epoch.moment(wall_ns, width_ns) for epoch in self._epochs]
        ends = [epoch.first_ns for epoch in self._epochs[1:]] + [None]
        fitting = [
            moment
            for moment, epoch, end in zip(whole, self._epochs, ends, strict=True)
            if (epoch.after_ns is None or moment.latest_ns >= epoch.after_ns)
            and (end is None or moment.earliest_ns <= end)
        ]
        # A time that the wall clock jumped over: as the present distance has it.
        fitting = fitting or whole[-1:]
        return Moment(min(m.earliest_ns for m in fitting), max(m.latest_ns for m in fitting))


class _Epoch:
    """A time without jumps of the wall clock.

    It began after ``after_ns`` (None: for ever) and by ``first_ns``; ``seen_ns`` is the last look.
    """

    after_ns: int | None
    seen_ns: int

    def __init__(self, before: _Epoch | None, clock: ClockSample) -> None:
        self.after_ns = None if before is None else before.seen_ns
        self.first_ns = self.seen_ns = clock.at_ns
        self.clock = clock

    def moment(self, wall_ns: int, width_ns: int) -> Moment:
        near = wall_ns - self.clock.offset_ns
        return Moment(
            near - self.clock.uncertainty_ns,
            near + max(width_ns - 1, 0) + self.clock.uncertainty_ns,
        )
