"""What a tracer's BPF programs cost for each I/O, by the kernel's own clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness import programs
from benchmarks.harness.load import Reading, Target, read
from benchmarks.rivals import Traced, Tracer
from kvprobe.bpf import attach, trial


@dataclass(frozen=True)
class Cost:
    """Net time of all programs of a tracer for each I/O, and of each program.

    Net is without the ``base_ns`` that statistics show for a program that does nothing.
    """

    ns_per_io: float
    runs_per_io: float
    programs: tuple[tuple[str, float, float], ...]
    """Name (the kernel keeps 15 letters), runs for each I/O, net nanoseconds for each run."""
    skipped: int
    """Runs that the kernel left out because that processor was in a BPF program already."""
    result: Traced
    ios: int
    """fio's own count of what it read while the tracer was attached."""
    requests: int
    """The disk's own count meanwhile."""


def measure(target: Target, how: Reading, tracer: Tracer, base_ns: float) -> Cost:
    """Run fio once with statistics on; they slow the load, so this is no throughput figure."""
    running = tracer.start(target.device, target.name)
    try:
        held = programs.held_by(running.pid)
        with programs.statistics():
            before = programs.runs_of(held)
            requests = target.completed()
            ios = read(target, how).ios
            requests = target.completed() - requests
            after = programs.runs_of(held)
        result = running.stop()
    finally:
        running.kill()
    each, total_ns, total_runs, skipped = [], 0.0, 0, 0
    for number, seen in after.items():
        runs = seen.runs - before[number].runs
        net_ns = seen.run_ns - before[number].run_ns - runs * base_ns
        skipped += seen.skipped - before[number].skipped
        total_ns += net_ns
        total_runs += runs
        if runs > ios // 1000:
            each.append((seen.name, runs / ios, net_ns / runs))
    each.sort(key=lambda item: -item[1] * item[2])
    return Cost(total_ns / ios, total_runs / ios, tuple(each), skipped, result, ios, requests)


def base_ns(target: Target, how: Reading) -> float:
    """What statistics show for a program that does nothing at the completion of each request."""
    with _idle_program() as number, programs.statistics():
        before = programs.runs_of(frozenset({number}))[number]
        read(target, how)
        after = programs.runs_of(frozenset({number}))[number]
    return (after.run_ns - before.run_ns) / max(1, after.runs - before.runs)


@contextmanager
def _idle_program() -> Iterator[int]:
    already = programs.held_by(os.getpid())
    program = trial.program()
    try:
        link = attach.attach_raw_tracepoint(program, "block_rq_complete")
        try:
            (number,) = programs.held_by(os.getpid()) - already
            yield number
        finally:
            os.close(link)
    finally:
        os.close(program)
