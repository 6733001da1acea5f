"""What tracing costs the traced: fio alone, beside kvprobe, beside what else there is.

Four cases: 4 KiB and 1 MiB random direct reads, on a loop device over memory, where the processors
are the limit (two jobs of fio for each fill them), and on a disk that is itself the limit.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from benchmarks.harness import program_cost, quiet
from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from benchmarks.harness.estimate import median_interval
from benchmarks.harness.load import Reading, Target, disk_target, memory_target
from benchmarks.harness.pairs import Pair, Patience, Samples, alternate
from benchmarks.harness.program_cost import Cost
from benchmarks.rivals import Tracer, command_line, kvprobe_agent, perf_buffer
from kvprobe.errors import KvprobeError
from kvprobe.model import Interval

OURS, RIVAL = "kvprobe", "perf_buffer"
AIM_RATIO = {"processors": 0.90, "device": 0.99}
AIM_TIMES_LESS_CPU = 20.0
AIM_NET_NS = 200.0
_PATIENCE_SECONDS = 2400.0
_QUICK_TRACERS = (OURS, f"{OURS}_block", RIVAL)
_MAIN_TRACERS = (*_QUICK_TRACERS, "bpftrace")
"""Those of every case; the first case has all there are."""


@dataclass(frozen=True)
class _Case:
    title: str
    limit: str
    target: Callable[[], AbstractContextManager[Target]]
    size_bytes: int
    depth: int
    jobs: int

    def reading(self, seconds: float) -> Reading:
        return Reading(self.size_bytes, self.depth, seconds, jobs=self.jobs)


@dataclass
class _Found:
    """All that one case brought."""

    samples: Samples
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    base_ns: float = 0.0


_FULL = 2 * (os.cpu_count() or 1)
_CASES = (
    _Case("4 KiB, processors are the limit", "processors", memory_target, 4096, 32, _FULL),
    _Case("1 MiB, processors are the limit", "processors", memory_target, 1 << 20, 8, _FULL),
    _Case("4 KiB, device is the limit", "device", disk_target, 4096, 32, 1),
    _Case("1 MiB, device is the limit", "device", disk_target, 1 << 20, 8, 1),
)


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Measure every case that this machine can show.

    Raises:
        KvprobeError: kvprobe itself does not start.
    """
    seconds = 0.5 if quick else 2.0
    patience = Patience(1, 0.0) if quick else Patience(5, _PATIENCE_SECONDS)
    outcome = Outcome(
        {
            "fio": f"random direct reads, libaio, windows of {seconds:g} s",
            "pairs": patience.pairs,
            "discard": f"beside more than {quiet.MOST_FOREIGN_SHARE:.0%} of a core of other work",
        }
    )
    for case in _CASES[:1] if quick else _CASES:
        say(case.title)
        try:
            with case.target() as target:
                first = None if case is _CASES[0] else _MAIN_TRACERS
                names = _QUICK_TRACERS if quick else first
                tracers = _those_that_start(target, names, outcome, say)
                found = _case(target, case, tracers, seconds, patience, say)
        except KvprobeError as error:
            outcome.notes.append(f"not measured: {case.title}: {error.message}")
            continue
        outcome.tables += _tables(case, target, tracers, found)
        outcome.aims += _aims(case, found)
        outcome.notes += _notes(case, found)
    return outcome


def _those_that_start(
    target: Target, names: Sequence[str] | None, outcome: Outcome, say: Callable[[str], None]
) -> tuple[Tracer, ...]:
    """Those that attach here; why the others do not becomes a note, once."""
    able = []
    for tracer in (*kvprobe_agent.tracers(), *perf_buffer.tracers(), *command_line.tracers()):
        if names is not None and tracer.name not in names:
            continue
        try:
            tracer.start(target.device, target.name).kill()
            able.append(tracer)
        except KvprobeError as error:
            note = f"{tracer.name} does not start on this machine: {error.message}"
            if note not in outcome.notes:
                say(note)
                outcome.notes.append(note)
    return tuple(able)


def _case(
    target: Target,
    case: _Case,
    tracers: Sequence[Tracer],
    seconds: float,
    patience: Patience,
    say: Callable[[str], None],
) -> _Found:
    how = case.reading(seconds)
    found = _Found(alternate(target, how, tracers, patience, say))
    say("cost of the programs")
    found.base_ns = program_cost.base_ns(target, how)
    for _ in range(min(3, patience.pairs)):
        for tracer in tracers:
            patience.wait()
            cost = program_cost.measure(target, how, tracer, found.base_ns)
            found.costs.setdefault(tracer.name, []).append(cost)
    return found


# ---------------------------------------------------------------- what is printed

_COLUMNS = (
    Column("tracer", "tracer"),
    Column("iops", "IOPS", ",.0f"),
    Column("ratio", "IOPS to untraced", ".3f"),
    Column("cpu_share", "CPU, % of a core", ".1f", 100),
    Column("user_us_per_row", "user us/row", ".3f"),
    Column("cpu_us_per_row", "CPU us/row", ".3f"),
    Column("delivered", "rows/fio I/Os", ".4f"),
    Column("lost", "lost", ",.0f"),
    Column("net_ns", "BPF net ns/I/O", ".0f"),
    Column("runs", "BPF runs/I/O", ".2f"),
    Column("peak_bytes", "peak MiB", ".0f", 2**-20),
)
_PROGRAM_COLUMNS = (
    Column("tracer", "tracer"),
    Column("program", "program"),
    Column("runs", "runs/I/O", ".3f"),
    Column("net_ns_per_run", "net ns/run", ".0f"),
    Column("net_ns_per_io", "net ns/I/O", ".1f"),
)


def _tables(
    case: _Case, target: Target, tracers: Sequence[Tracer], found: _Found
) -> tuple[Table, Table]:
    untraced = [
        window.iops
        for pairs in found.samples.pairs.values()
        for pair in pairs
        for window in (pair.before, pair.after)
    ]
    rows: list[Mapping[str, Value]] = [
        {"tracer": "untraced", "iops": statistics.median(untraced), "ratio": None}
    ]
    rows += [_row(tracer, found) for tracer in tracers]
    programs: list[Mapping[str, Value]] = []
    for tracer in tracers:
        middle = _middle_cost(found.costs[tracer.name])
        programs += [
            {
                "tracer": tracer.name,
                "program": name,
                "runs": runs,
                "net_ns_per_run": ns,
                "net_ns_per_io": runs * ns,
            }
            for name, runs, ns in middle.programs
        ]
    return (
        Table(_title(case, target), _COLUMNS, tuple(rows)),
        Table(f"programs of the same case, base {found.base_ns:.0f} ns a run subtracted",
              _PROGRAM_COLUMNS, tuple(programs)),
    )  # fmt: skip


def _title(case: _Case, target: Target) -> str:
    load = f"{case.jobs} x {case.depth} in flight, {target.what}"
    return f"{case.title} ({load}); medians [90 % interval]"


def _row(tracer: Tracer, found: _Found) -> dict[str, Value]:
    pairs = found.samples.pairs[tracer.name]
    costs = found.costs[tracer.name]
    row: dict[str, Value] = {
        "tracer": tracer.name,
        "iops": statistics.median(pair.traced.iops for pair in pairs),
        "ratio": median_interval([pair.ratio for pair in pairs]),
        "cpu_share": statistics.median(map(_cpu_share, pairs)),
        "net_ns": median_interval([cost.ns_per_io for cost in costs]),
        "runs": statistics.median(cost.runs_per_io for cost in costs),
        "peak_bytes": max(pair.result.peak_bytes for pair in pairs),
    }
    results = [pair.result for pair in pairs] + [cost.result for cost in costs]
    lost = [result.lost for result in results if result.lost is not None]
    row["lost"] = sum(lost) if lost else None
    if any(pair.result.rows for pair in pairs):
        row["user_us_per_row"] = _user_us_per_row(pairs)
        row["cpu_us_per_row"] = median_interval(
            [
                1e6 * (p.result.user_seconds + p.result.system_seconds) / max(1, p.result.rows)
                for p in pairs
            ]
        )
        row["delivered"] = sum(c.result.rows for c in costs) / sum(c.ios for c in costs)
    return row


def _cpu_share(pair: Pair) -> float:
    return (pair.result.user_seconds + pair.result.system_seconds) / pair.attached_seconds


def _user_us_per_row(pairs: Sequence[Pair]) -> Interval:
    return median_interval([1e6 * p.result.user_seconds / max(1, p.result.rows) for p in pairs])


def _middle_cost(costs: Sequence[Cost]) -> Cost:
    return sorted(costs, key=lambda cost: cost.ns_per_io)[len(costs) // 2]


def _aims(case: _Case, found: _Found) -> list[Aim]:
    ratio = median_interval([pair.ratio for pair in found.samples.pairs[OURS]])
    least = AIM_RATIO[case.limit]
    aims = [
        Aim(
            f"within {1 - least:.0%} of untraced ({case.title})",
            f"{1 - ratio.mid:+.1%} [{1 - ratio.high:+.1%}, {1 - ratio.low:+.1%}] slower",
            ratio.mid >= least,
        )
    ]
    if case.size_bytes > 4096:
        return aims
    if RIVAL in found.samples.pairs:
        ours = _user_us_per_row(found.samples.pairs[OURS])
        theirs = _user_us_per_row(found.samples.pairs[RIVAL])
        times = theirs.mid / ours.mid if ours.mid else float("inf")
        aims.append(
            Aim(
                f"{AIM_TIMES_LESS_CPU:.0f} x less user CPU a row than {RIVAL} ({case.title})",
                f"{times:.0f} x ({ours.mid:.3f} against {theirs.mid:.2f} us)",
                times >= AIM_TIMES_LESS_CPU,
            )
        )
    for name in (OURS, f"{OURS}_block"):
        net = median_interval([cost.ns_per_io for cost in found.costs[name]])
        aims.append(
            Aim(
                f"under {AIM_NET_NS:.0f} ns net for each direct I/O, {name} ({case.title})",
                f"{net.mid:.0f} ns [{net.low:.0f}, {net.high:.0f}]",
                net.mid < AIM_NET_NS,
            )
        )
    return aims


def _notes(case: _Case, found: _Found) -> list[str]:
    samples = found.samples
    notes = []
    if samples.discarded or samples.disturbed:
        notes.append(
            f"{case.title}: {samples.discarded} pairs discarded because others used the machine, "
            f"{samples.disturbed} disturbed ones kept when patience was at its end"
        )
    stolen = [w.stolen for pairs in samples.pairs.values() for p in pairs for w in p.windows]
    if max(stolen) > quiet.MOST_FOREIGN_SHARE:
        notes.append(
            f"{case.title}: the hypervisor stole {statistics.median(stolen):.0%} of a core in the "
            f"median window, {max(stolen):.0%} at most"
        )
    for name, costs in found.costs.items():
        requests = sum(cost.requests for cost in costs)
        missing = requests - sum(cost.result.rows for cost in costs)
        lost = sum(cost.result.lost or 0 for cost in costs)
        if missing > 0 and any(cost.result.rows for cost in costs):
            notes.append(
                f"{case.title}: {name} delivered no row for {missing:,} of {requests:,} requests "
                f"that the disk counted ({missing / requests:.3%}), and counted {lost:,} as lost"
            )
    skipped = sum(cost.skipped for costs in found.costs.values() for cost in costs)
    if skipped:
        notes.append(f"{case.title}: the kernel left out {skipped:,} runs: one was running already")
    return notes
