"""Alternating windows: untraced, one tracer, untraced, the next tracer .. while one fio reads on.

A tracer is compared with the untraced windows just before and after it, so that a machine that
slowly changes its speed does not look like a cost; and fio is not started anew, because where the
scheduler first puts it and the device's worker changes its speed more than most tracers do.
Windows beside other people's work are discarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.harness import programs, quiet
from benchmarks.harness.load import Reader, Reading, Target, reading
from benchmarks.rivals import Traced, Tracer

_LONGEST_SECONDS = 36_000.0
_SETTLE_SECONDS = 0.3
"""After attaching and after detaching."""


@dataclass(frozen=True)
class Window:
    """A few seconds of reading; the shares are of a core, see ``quiet.ForeignLoad``."""

    iops: float
    foreign: float
    stolen: float
    others_traced: bool

    @property
    def clean(self) -> bool:
        """Whether it says something about this machine and tracer alone."""
        return self.foreign <= quiet.MOST_FOREIGN_SHARE and not self.others_traced


@dataclass(frozen=True)
class Pair:
    """A traced window between two untraced ones, and the tracer's own account."""

    before: Window
    traced: Window
    after: Window
    result: Traced
    attached_seconds: float

    @property
    def windows(self) -> tuple[Window, Window, Window]:
        """In the order in which they were."""
        return self.before, self.traced, self.after

    @property
    def clean(self) -> bool:
        """Whether all three windows are."""
        return all(window.clean for window in self.windows)

    @property
    def foreign(self) -> float:
        """The worst of the three."""
        return max(window.foreign for window in self.windows)

    @property
    def ratio(self) -> float:
        """I/Os per second, traced to untraced (geometric mean of both neighbours)."""
        return self.traced.iops / math.sqrt(self.before.iops * self.after.iops)


@dataclass
class Samples:
    """Pairs by tracer, and what became of the others."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    discarded: int = 0
    disturbed: int = 0
    """Kept although others used the machine: no better one was to be had."""


@dataclass
class Patience:
    """How many pairs of each tracer, and seconds left for quiet moments and pairs to repeat."""

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
        """Whether a disturbed pair is to be repeated rather than kept."""
        return self.seconds > 0


def alternate(
    target: Target,
    how: Reading,
    tracers: Sequence[Tracer],
    patience: Patience,
    say: Callable[[str], None],
) -> Samples:
    """Measure each tracer ``patience.pairs`` times, in windows of ``how.seconds``.

    Raises:
        KvprobeError: fio or a tracer that has started before fails.
    """
    samples = Samples({tracer.name: [] for tracer in tracers})
    last: Window | None = None
    with reading(target, replace(how, seconds=_LONGEST_SECONDS)) as reader:
        time.sleep(1 + _SETTLE_SECONDS)
        for number in range(patience.pairs):
            for tracer in tracers:
                pair = None
                while pair is None:
                    began = time.monotonic()
                    pair = _pair(target, reader, how.seconds, tracer, patience, last)
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
    target: Target,
    reader: Reader,
    seconds: float,
    tracer: Tracer,
    patience: Patience,
    last: Window | None,
) -> Pair | None:
    """One tracer between two untraced windows; None: disturbed, and there is patience for another.

    The first window may be the last of the pair before.
    """
    if last is None or not last.clean:
        patience.wait()
        last = _window(reader, seconds)
        if not last.clean and patience.lasts:
            return None
    running = tracer.start(target.device, target.name)
    attached = time.monotonic()
    try:
        patience.wait()
        traced = _window(reader, seconds)
        attached = time.monotonic() - attached
        result = running.stop()
    finally:
        running.kill()
    if not traced.clean and patience.lasts:
        return None
    time.sleep(_SETTLE_SECONDS)
    patience.wait()
    pair = Pair(last, traced, _window(reader, seconds), result, attached)
    return pair if pair.clean or not patience.lasts else None


def _window(reader: Reader, seconds: float) -> Window:
    """What fio reads in so many seconds, and what goes on beside it."""
    others = programs.held_by_others(quiet.family())
    load = quiet.ForeignLoad()
    began, before = time.monotonic(), reader.ios()
    time.sleep(seconds)
    done, ended = reader.ios() - before, time.monotonic()
    share, stolen = load.share(), load.stolen()
    others = others or programs.held_by_others(quiet.family())
    return Window(done / (ended - began), share, stolen, others)
