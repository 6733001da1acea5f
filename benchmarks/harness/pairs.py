"""Alternating runs: untraced, one tracer, untraced, the next tracer .. in one session.

A tracer is compared with the untraced runs just before and after it, so that a machine that slowly
changes its speed does not look like a cost. Runs beside other people's work are discarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import programs, quiet
from benchmarks.harness.load import Read, Reading, Target, read
from benchmarks.rivals import Traced, Tracer


@dataclass(frozen=True)
class Run:
    """One fio run. ``foreign`` is the share of a core that others used meanwhile."""

    read: Read
    requests: int
    """Completed by the disk meanwhile, by its own count."""
    foreign: float
    others_traced: bool

    @property
    def clean(self) -> bool:
        """Whether it says something about this machine and tracer alone."""
        return self.foreign <= quiet.MOST_FOREIGN_SHARE and not self.others_traced


@dataclass(frozen=True)
class Pair:
    """A traced run between two untraced ones."""

    before: Run
    traced: Run
    after: Run
    result: Traced

    @property
    def clean(self) -> bool:
        """Whether all three runs are."""
        return self.before.clean and self.traced.clean and self.after.clean

    @property
    def foreign(self) -> float:
        """The worst of the three."""
        return max(self.before.foreign, self.traced.foreign, self.after.foreign)

    @property
    def ratio(self) -> float:
        """I/Os per second, traced to untraced (geometric mean of both neighbours)."""
        return self.traced.read.iops / math.sqrt(self.before.read.iops * self.after.read.iops)


@dataclass
class Samples:
    """Pairs by tracer, and what became of the others."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    discarded: int = 0
    disturbed: int = 0
    """Kept although others used the machine: no better one was to be had."""


@dataclass
class Patience:
    """How many pairs of each tracer, and seconds left for quiet moments and runs to repeat."""

    pairs: int
    seconds: float

    def wait(self) -> None:
        """Wait for a quiet moment as long as there is patience."""
        began = time.monotonic()
        quiet.wait_until_quiet(max(0.0, self.seconds))
        self.spend(time.monotonic() - began - quiet.SAMPLE_SECONDS)

    def spend(self, seconds: float) -> None:
        """Take from what is left."""
        self.seconds -= seconds

    @property
    def lasts(self) -> bool:
        """Whether a disturbed run is to be repeated rather than kept."""
        return self.seconds > 0


def alternate(
    target: Target,
    how: Reading,
    tracers: Sequence[Tracer],
    patience: Patience,
    say: Callable[[str], None],
) -> Samples:
    """Measure each tracer ``patience.pairs`` times.

    Raises:
        KvprobeError: fio or a tracer that has started before fails.
    """
    samples = Samples({tracer.name: [] for tracer in tracers})
    last: Run | None = None
    for number in range(patience.pairs):
        for tracer in tracers:
            pair = None
            while pair is None:
                began = time.monotonic()
                pair = _pair(target, how, tracer, patience, last)
                if pair is None:
                    last = None
                    samples.discarded += 1
                    patience.spend(time.monotonic() - began)
            last = pair.after
            samples.disturbed += not pair.clean
            samples.pairs[tracer.name].append(pair)
            said = f"pair {number + 1} of {patience.pairs}: {tracer.name} {pair.ratio:.3f}"
            say(said if pair.clean else f"{said}, beside {pair.foreign:.0%} of other work")
    return samples


def _pair(
    target: Target, how: Reading, tracer: Tracer, patience: Patience, last: Run | None
) -> Pair | None:
    """One tracer between two untraced runs; None: disturbed, and there is patience for another.

    The first run may be the last of the pair before.
    """
    if last is None or not last.clean:
        patience.wait()
        last = run(target, how)
        if not last.clean and patience.lasts:
            return None
    running = tracer.start(target.device, target.name)
    try:
        patience.wait()
        traced = run(target, how)
        result = running.stop()
    finally:
        running.kill()
    if not traced.clean and patience.lasts:
        return None
    patience.wait()
    pair = Pair(last, traced, run(target, how), result)
    return pair if pair.clean or not patience.lasts else None


def run(target: Target, how: Reading) -> Run:
    """One fio run and what went on beside it."""
    others = programs.held_by_others(quiet.family())
    load = quiet.ForeignLoad()
    before = target.completed()
    done = read(target, how)
    requests = target.completed() - before
    share = load.share()
    others = others or programs.held_by_others(quiet.family())
    return Run(done, requests, share, others)
