"""What restores would take with another unit size or more reads in flight, from measured cells.

The engine is a closed queue: ``N`` reads in flight, time ``Z`` of each read above storage (software
around it, the pause until the next one), a device whose response time ``L`` depends on the depth a
read finds there. This is the interactive response time law (Lazowska et al., Quantitative System
Performance, 1984, ch. 3) with Schweitzer's approximation of the depth at arrival (ibid. ch. 6):

    restore = m * (Z + L) / N          m reads a restore, N = min(reads in flight, m)
    L       = k * x * s / rate(s, x)   Little's law on a measured cell of s-byte reads at depth x
    x       = 1 + (c * N - 1) * L / (Z + L)
    c       = 1 + (c_now - 1) * restore / restore_now

``c`` requests restore at once: shorter restores meet less often. ``Z`` and ``k`` come from the
capture, so that the model at the present setting equals the measured restore; ``k`` is how much
longer the device took for a read than in the measured cell.

Nothing is extrapolated: where a cell is missing there is no prediction, and ``sweep_command``
says what to measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvprobe.model import (
    Effect,
    EngineFacts,
    EngineSetting,
    Facts,
    Interval,
    Proposal,
    RestoreSample,
)
from kvprobe.surface import SAME, Response, Surface

COPY_BYTES_PER_S = 2 * 2**30
"""Slowest copy in memory that the time above storage may contain: that part grows with the unit."""
CLOSE_TO_BEST = 0.9
ROUNDS = 60
MAX_DEPTH = 64
ALIGNMENT_BYTES = 4096
SWEPT_FILE_BYTES = 512 << 20
"""Default size of the file that a sweep reads; it must hold many reads of the largest size."""


@dataclass(frozen=True)
class _Now:
    """The present restores, per restore; times in ns."""

    n: int
    unit_bytes: float
    bytes: float
    read_bytes: float
    reads: float
    restore_ns: float
    above_ns: float
    read_ns: float
    serial_ns: float
    """Software and idle time of one read: what one thread would do for all of them."""
    in_flight: float
    at_once: float
    set_in_flight: int | None
    """What the engine was set to; ``in_flight`` is what came of it."""

    @property
    def depth(self) -> float:
        """Depth that a read finds at the device, itself included."""
        return _depth(self.at_once * self.in_flight, self.read_ns, self.above_ns)


def _present(facts: Facts) -> _Now | None:
    sample = facts.restore
    if sample is None or min(sample.n, sample.ops, sample.bytes, sample.restore_ns) <= 0:
        return None
    read_bytes = _read_bytes(sample, facts.engine)
    reads, restore_ns = sample.bytes / sample.n / read_bytes, sample.restore_ns / sample.n
    in_flight = max(1.0, sample.effective_depth)
    above = (sample.idle_ns + sample.software_ns) / sample.restore_ns
    cycle_ns = in_flight * restore_ns / reads
    if above >= 1:
        return None  # storage had no part in it
    unit = facts.engine.unit_bytes if facts.engine else None
    return _Now(
        n=sample.n,
        unit_bytes=unit or read_bytes,
        bytes=sample.bytes / sample.n,
        read_bytes=read_bytes,
        reads=reads,
        restore_ns=restore_ns,
        above_ns=cycle_ns * above,
        read_ns=cycle_ns * (1 - above),
        serial_ns=(sample.idle_ns + sample.software_ns) / sample.ops,
        in_flight=in_flight,
        at_once=max(1.0, sample.restoring_at_once or 1.0),
        set_in_flight=facts.engine.reads_in_flight if facts.engine else None,
    )


def _read_bytes(sample: RestoreSample, engine: EngineFacts | None) -> float:
    """Bytes a read: the whole unit, unless the engine reads a unit in two or more pieces.

    The mean alone is below the unit where a read that requests share counts for each of them.
    """
    mean = sample.bytes / sample.ops
    unit = engine.unit_bytes if engine else None
    return float(unit) if unit and unit / 2 * SAME < mean < unit * SAME else mean


@dataclass(frozen=True)
class _Setting:
    """What a restore would look like: bytes a read, reads a restore, reads in flight, ``Z``."""

    read_bytes: float
    reads: float
    in_flight: float
    above_ns: float


def _changed(now: _Now, unit_bytes: float | None, reads_in_flight: int | None) -> _Setting:
    growth = (unit_bytes or now.unit_bytes) / now.unit_bytes
    if now.read_bytes < now.unit_bytes:
        growth = 1.0  # the engine reads a unit in pieces: their size does not follow the unit
    reads = max(1.0, now.reads / growth)
    unchanged = reads_in_flight is None or reads_in_flight == now.set_in_flight
    wanted = now.in_flight if unchanged else float(reads_in_flight or 1)
    return _Setting(now.read_bytes * growth, reads, max(1.0, min(wanted, reads)), now.above_ns)


def predict_restore(
    facts: Facts, unit_bytes: int | None = None, reads_in_flight: int | None = None
) -> Interval | None:
    """Mean exposed restore in ns at another setting; None where no cell was measured.

    The interval is a range of models widened by noise. Range: the low end takes the better of
    ``k`` and 1, the high end the worse; there the last round of reads also counts in full where
    ``N`` does not divide ``m`` (the middle takes half of that), all software may run on one
    thread, and the part of ``Z`` that may be copying grows with the unit (in the middle too where
    reads are buffered: those do copy). Noise: the relative
    half-widths of the cells at the present and the new setting and 1/sqrt(restores), combined as
    the root of their squares.

    Args:
        facts: the capture's restores and measured cells.
        unit_bytes: bytes of the engine's smallest file or slot; None: as it is.
        reads_in_flight: reads of one request at once; None: as it is.
    """
    now = _present(facts)
    if now is None:
        return None
    to = _changed(now, unit_bytes, reads_in_flight)
    noise = 1 / now.n
    same = math.isclose(to.read_bytes, now.read_bytes) and math.isclose(to.in_flight, now.in_flight)
    if same:
        return _interval(now.restore_ns, now.restore_ns, now.restore_ns, noise, now.n)
    for surface in _surfaces(facts):
        here = surface.response(now.read_bytes, now.depth)
        if here is None:
            continue
        k = now.read_ns / here.mid
        copying = min(now.above_ns, now.read_bytes / COPY_BYTES_PER_S * 1e9)
        grown = now.above_ns + copying * max(0.0, to.read_bytes / now.read_bytes - 1)
        slow = replace(to, above_ns=grown)
        mid = _solve(surface, now, to if _direct(facts) else slow, k)
        low = _solve(surface, now, to, min(k, 1.0))
        high = _solve(surface, now, slow, max(k, 1.0))
        if mid is None or low is None or high is None:
            continue
        last = max(0.0, _last_round(to.in_flight) - _last_round(now.in_flight))
        one_thread = to.reads * now.serial_ns if to.in_flight > now.in_flight else 0.0
        return _interval(
            mid.restore_ns + last / 2 * mid.cycle_ns,
            low.restore_ns,
            high.restore_ns + last * high.cycle_ns,
            noise + _half_width(here) ** 2 + _half_width(mid.response) ** 2,
            now.n,
            one_thread * math.exp(math.sqrt(noise)),
        )
    return None


def _last_round(in_flight: float) -> float:
    """Mean part of a round that is lost because the last one is not full: E[ceil] - m/N."""
    return (in_flight - 1) / (2 * in_flight)


def _interval(
    mid: float, low: float, high: float, noise: float, n: int, at_worst: float = 0.0
) -> Interval:
    spread = math.exp(math.sqrt(noise))
    return Interval(mid, min(low, mid) / spread, max(max(high, mid) * spread, at_worst), n)


def _half_width(response: Response) -> float:
    return math.log(response.high / response.low) / 2


def _depth(readers: float, read_ns: float, above_ns: float) -> float:
    return 1 + (readers - 1) * read_ns / (read_ns + above_ns)


class _Solution(NamedTuple):
    restore_ns: float
    cycle_ns: float
    response: Response


def _solve(surface: Surface, now: _Now, to: _Setting, k: float) -> _Solution | None:
    """Fixed point of the equations above, reached from an idle device upwards."""
    read_ns, at_once = 0.0, 1.0
    found: _Solution | None = None
    for _ in range(ROUNDS):
        depth = _depth(at_once * to.in_flight, max(read_ns, 1.0), to.above_ns)
        response = surface.response(to.read_bytes, depth)
        if response is None:
            return None
        read_ns = k * response.mid
        cycle_ns = read_ns + to.above_ns
        restore_ns = to.reads * cycle_ns / to.in_flight
        at_once = 1 + (now.at_once - 1) * restore_ns / now.restore_ns
        before = found
        found = _Solution(restore_ns, cycle_ns, response)
        if before and math.isclose(before.restore_ns, restore_ns, rel_tol=1e-6):
            break
    return found


def _surfaces(facts: Facts) -> list[Surface]:
    """What to interpolate in: a sweep alone (one method at both ends), else all cells."""
    direct = _direct(facts)
    cells = {
        (cell.size_bytes, cell.depth): cell
        for cell in sorted(facts.surface, key=lambda cell: cell.source == "sweep")
        if cell.direct == direct
    }
    swept = [cell for cell in cells.values() if cell.source == "sweep"]
    return [Surface(swept), Surface(cells.values())]


def _direct(facts: Facts) -> bool:
    known = facts.engine.direct if facts.engine else None
    return any(cell.direct for cell in facts.surface) if known is None else known


def predict_ttft(
    facts: Facts, unit_bytes: int | None = None, reads_in_flight: int | None = None
) -> Interval | None:
    """Mean time to first token in ns of the requests that restore; None as ``predict_restore``.

    All but the exposed restore stays as measured. A larger unit finds on average half the growth
    fewer tokens (none at the low end, the whole growth at the high end), which are prefilled;
    that is left out where the cost of a token is unknown.
    """
    sample, restore = facts.restore, predict_restore(facts, unit_bytes, reads_in_flight)
    if sample is None or restore is None:
        return None
    rest = (sample.ttft_ns - sample.restore_ns) / sample.n
    lost = lost_prefix_ns(facts, unit_bytes)
    return Interval(
        rest + restore.mid + lost, rest + restore.low, rest + restore.high + 2 * lost, restore.n
    )


def lost_prefix_ns(facts: Facts, unit_bytes: int | None) -> float:
    """Mean prefill in ns of the tokens that only the present, smaller unit would have matched."""
    engine, cost = facts.engine, facts.recompute_ns_per_token
    if unit_bytes is None or engine is None or cost is None:
        return 0.0
    if not engine.unit_bytes or not engine.bytes_per_token:
        return 0.0
    return max(0, unit_bytes - engine.unit_bytes) / 2 / engine.bytes_per_token * cost


def restore_effect(
    facts: Facts, unit_bytes: int | None = None, reads_in_flight: int | None = None
) -> Effect | None:
    """Predicted change of the exposed restore as a share of the present one."""
    now, then = _present(facts), predict_restore(facts, unit_bytes, reads_in_flight)
    if now is None or then is None:
        return None
    low, mid, high = (x / now.restore_ns - 1 for x in (then.low, then.mid, then.high))
    return Effect("exposed_restore_ns", low, mid, high)


def settings_after(facts: Facts, proposals: Iterable[Proposal]) -> tuple[int | None, int | None]:
    """Unit bytes and reads in flight once all proposals are applied; None: as it is."""
    now = _present(facts)
    unit: int | None = None
    reads: int | None = None
    for proposal in proposals:
        if proposal.needs is not None or not isinstance(proposal.proposed, int):
            continue
        if proposal.knob == "unit_bytes":
            unit = proposal.proposed
        elif proposal.knob == "bytes_in_flight" and now is not None:
            reads = max(1, round(proposal.proposed / now.unit_bytes))
    return unit, reads


def smallest_near_best(costs: Mapping[int, float]) -> int | None:
    """The smallest setting whose cost is at most that of the best over 0.9; None of nothing.

    Beyond the knee a larger unit or more depth buys little and costs memory and latency.
    """
    if not costs:
        return None
    limit = min(costs.values()) / CLOSE_TO_BEST
    return min(value for value, cost in costs.items() if cost <= limit)


def sweep_command(facts: Facts) -> str:
    """The measurement that predictions for these facts lack, as a command."""
    now = _present(facts)
    root = facts.engine.root if facts.engine else None
    mounts = facts.device.mounts if facts.device else ()
    where = root or next(iter(mounts), "DIR")
    mode = "--direct" if _direct(facts) or not facts.surface else "--buffered"
    if facts.engine and facts.engine.direct is False:
        mode = "--buffered"
    words = [f"kvprobe sweep {where} {mode}"]
    if now is not None:
        largest = min(now.bytes / 4, SWEPT_FILE_BYTES / MAX_DEPTH)
        larger = [now.read_bytes * 4**k for k in range(1, 4)]
        sizes = [now.read_bytes, *(size for size in larger if size <= largest)]
        words.append("--sizes " + ",".join(map(_size, sizes)))
        deepest = min(MAX_DEPTH, 2 ** math.ceil(math.log2(16 * now.at_once / SAME)))
        depths = [2**k for k in range(deepest.bit_length())]
        words.append("--depths " + ",".join(map(str, depths)))
        if sizes[-1] * MAX_DEPTH > SWEPT_FILE_BYTES:
            words.append("--max-bytes " + _size(sizes[-1] * MAX_DEPTH))
    return " ".join(words)


def _size(count: float) -> str:
    aligned = max(1, math.ceil(count / ALIGNMENT_BYTES - 0.01)) * ALIGNMENT_BYTES
    return f"{aligned >> 20}m" if aligned % 2**20 == 0 else f"{aligned >> 10}k"


def setting(facts: Facts, knob: str, value: int) -> EngineSetting | None:
    """An engine-neutral knob in the engine's words; None where the engine is not known."""
    translate = facts.settings.get(knob)
    return translate(value) if translate else None


def in_words(said: EngineSetting | None, knob: str, value: int) -> str:
    """How to make a change, or why it cannot be made: one line."""
    if said is None:
        return f"set {knob} to {value} in the engine; kvprobe does not know its words"
    if said.name is None:
        return said.how
    change = said.name if said.value is None else f"{said.name} {said.value}"
    return f"{change} ({said.how})" if said.how else change
