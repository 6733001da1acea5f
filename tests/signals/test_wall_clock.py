"""Wall clock readings on CLOCK_MONOTONIC: exact without jumps, honest about them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.clock import ClockSample, Moment, WallClock, clock_step_ns, sample_clocks

SECOND_NS = 1_000_000_000
OFFSET_NS = 1_796_145_600 * SECOND_NS


class Clocks:
    """A machine whose wall clock can be set: it is ``offset_ns`` ahead of ``now_ns``."""

    def __init__(self, uncertainty_ns: int = 0) -> None:
        self.now_ns, self.offset_ns, self.uncertainty_ns = 0, OFFSET_NS, uncertainty_ns

    def sample(self) -> ClockSample:
        return ClockSample(self.now_ns, self.offset_ns, self.uncertainty_ns)

    @property
    def wall_ns(self) -> int:
        return self.now_ns + self.offset_ns


def stepped(by_s: int) -> tuple[WallClock, Clocks]:
    """Set by ``by_s`` in second 100, with looks in the seconds 0, 99, 101 and 200."""
    clocks = Clocks()
    clock = WallClock(clocks.sample)
    for now_s in (99, 101, 200):
        if now_s == 101:
            clocks.offset_ns += by_s * SECOND_NS
        clocks.now_ns = now_s * SECOND_NS
        clock.look()
    return clock, clocks


def seconds(moment: Moment) -> tuple[float, float]:
    return moment.earliest_ns / SECOND_NS, moment.latest_ns / SECOND_NS


def at(clock: WallClock, wall_s: int) -> tuple[float, float]:
    return seconds(clock.moment(OFFSET_NS + wall_s * SECOND_NS))


def test_without_a_jump_a_reading_is_a_point() -> None:
    clock, _ = stepped(0)
    assert clock.steps == 0
    assert [at(clock, s) for s in (-7, 50, 100, 1009)] == [(s, s) for s in (-7, 50, 100, 1009)]


@pytest.mark.parametrize("by_s", [60, -60])
def test_a_jump_is_seen_once(by_s: int) -> None:
    clock, clocks = stepped(by_s)
    assert clock.steps == 1
    for _ in range(7):
        clocks.now_ns += SECOND_NS
        clock.look()
    assert clock.steps == 1


def test_set_forward() -> None:
    clock, _ = stepped(60)
    assert at(clock, 50) == (50, 50)
    assert at(clock, 98) == (98, 98)
    assert at(clock, 170) == (110, 110)
    assert at(clock, 260) == (200, 200)
    # 02:00 of those that were left out: what the present distance makes of them.
    assert at(clock, 130) == (70, 70)


def test_set_back_a_reading_that_came_twice_is_both() -> None:
    clock, _ = stepped(-60)
    assert at(clock, 30) == (30, 30)
    assert at(clock, 38) == (38, 38)
    assert at(clock, 50) == (50, 110)
    assert at(clock, 98) == (98, 158)
    assert at(clock, 110) == (170, 170)
    assert at(clock, 140) == (200, 200)


def test_a_reading_between_two_looks_is_of_either_side() -> None:
    """The clock was set somewhere between the seconds 99 and 101."""
    clock, _ = stepped(-60)
    assert at(clock, 40) == (40, 100)
    assert at(clock, 100) == (100, 160)
    clock, _ = stepped(60)
    assert at(clock, 100) == (100, 100)
    assert at(clock, 160) == (100, 100)


def test_set_twice() -> None:
    clock, clocks = stepped(-60)
    clocks.now_ns, clocks.offset_ns = 201 * SECOND_NS, OFFSET_NS - 10 * SECOND_NS
    clock.look()
    assert clock.steps == 2
    assert at(clock, 20) == (20, 20)
    assert at(clock, 70) == (70, 130)
    assert at(clock, 120) == (180, 180)
    assert at(clock, 291) == (301, 301)


def test_a_width_is_the_readings_that_look_the_same() -> None:
    clocks = Clocks(uncertainty_ns=7)
    clock = WallClock(clocks.sample)
    assert clock.moment(OFFSET_NS + 5, 1) == Moment(5 - 7, 5 + 7)
    assert clock.moment(OFFSET_NS + 5) == Moment(5 - 7, 5 + 7)
    assert clock.moment(OFFSET_NS, SECOND_NS) == Moment(-7, SECOND_NS - 1 + 7)


def test_the_tightest_sample_counts() -> None:
    clocks = Clocks(uncertainty_ns=900)
    clock = WallClock(clocks.sample)
    clocks.uncertainty_ns, clocks.offset_ns = 30, OFFSET_NS + 11
    clock.look()
    clocks.uncertainty_ns, clocks.offset_ns = 400, OFFSET_NS - 100
    clock.look()
    assert clock.steps == 0
    assert clock.moment(OFFSET_NS + 11) == Moment(-30, 30)


def test_a_move_that_the_samples_explain_is_no_jump() -> None:
    first, second = ClockSample(0, 1000, 40), ClockSample(9, 1071, 31)
    assert clock_step_ns(first, second) == 0
    assert clock_step_ns(first, second._replace(offset_ns=1072)) == 72
    assert clock_step_ns(first, second._replace(offset_ns=928)) == -72


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(-40, 40)), min_size=1, max_size=6),
    st.lists(st.integers(0, 3000), max_size=20),
    st.sampled_from([0, 1, SECOND_NS]),
)
def test_a_moment_holds_the_truth_however_the_clock_was_set(
    steps: list[tuple[int, int]], tenths: list[int], width_ns: int
) -> None:
    """The clock is looked at each second and set at half past some of them."""
    clocks = Clocks()
    clock = WallClock(clocks.sample)
    due: list[tuple[int, int]] = []
    for wait_s, by_s in steps:
        due.append(((due[-1][0] if due else 0) + wait_s * SECOND_NS + SECOND_NS // 2, by_s))
    truth = []
    for tenth in range(3001):
        clocks.now_ns = tenth * SECOND_NS // 10
        while due and due[0][0] <= clocks.now_ns:
            clocks.offset_ns += due.pop(0)[1] * SECOND_NS
        if tenth % 10 == 0:
            clock.look()
        if tenth in tenths:
            truth.append((clocks.now_ns, clocks.wall_ns))
    for now_ns, wall_ns in truth:
        shown_ns = wall_ns - wall_ns % width_ns if width_ns else wall_ns
        moment = clock.moment(shown_ns, width_ns)
        assert moment.earliest_ns <= now_ns <= moment.latest_ns


def test_this_machine() -> None:
    clock = WallClock()
    sample = sample_clocks()
    assert 0 < sample.uncertainty_ns < 100_000
    for _ in range(101):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        moment = clock.moment(wall_ns)
        assert moment.earliest_ns <= after_ns and before_ns <= moment.latest_ns
    clock.look()
    assert clock.steps == 0


def test_moments() -> None:
    moment = Moment(10, 21)
    assert (moment.middle_ns, moment.uncertainty_ns) == (15, 6)
    assert moment.later(100) == Moment(110, 121)
    assert (Moment(7, 7).middle_ns, Moment(7, 7).uncertainty_ns) == (7, 0)
    for edge in moment:
        assert abs(edge - moment.middle_ns) <= moment.uncertainty_ns


def test_at_least_one_round() -> None:
    with pytest.raises(ValueError, match="round"):
        sample_clocks(0)
