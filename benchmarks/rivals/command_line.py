"""Tracers that print a line for each request: a bpftrace script, and Debian's biosnoop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import programs
from benchmarks.rivals import LineTracer, Running, Tracer

_SCRIPT = """
BEGIN {{ printf("ready\\n"); }}
tracepoint:block:block_rq_issue /args->dev == {device}/
{{
	@start[args->dev, args->sector] = nsecs;
}}
tracepoint:block:block_rq_complete /args->dev == {device} && @start[args->dev, args->sector]/
{{
	printf("%llu %s %d %llu %u %d\\n", nsecs, comm, args->dev, args->sector, args->nr_sector,
		(nsecs - @start[args->dev, args->sector]) / 1000);
	delete(@start[args->dev, args->sector]);
}}
END {{ clear(@start); }}
"""
_TRACING = Path("/sys/kernel/tracing")
_ATTACHING_SECONDS = 1.0
"""From the first loaded program to the last attached one."""


def tracers() -> tuple[Tracer, ...]:
    """Both."""
    return (
        Tracer("bpftrace", "bpftrace: a line for each request", _bpftrace),
        Tracer("biosnoop", "Debian's biosnoop (bpfcc-tools)", _biosnoop),
    )


def with_tracing(command: Sequence[str]) -> list[str]:
    """Run a command where tracefs is mounted: in a mount namespace of its own if it is not here."""
    if (_TRACING / "events").exists():
        return list(command)
    mounted = f'mount -t tracefs tracefs {_TRACING} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounted, "sh", *command]


def _bpftrace(device: int, name: str) -> Running:
    return LineTracer(
        with_tracing(["bpftrace", "-e", _SCRIPT.format(device=device)]),
        row=r"^\d+ .* \d+ \d+ \d+ -?\d+$",
        lost=r"^Lost (\d+) events",
        environment={"BPFTRACE_MAP_KEYS_MAX": "16384"},
        is_attached=_loaded_for_a_while(lambda said: "ready\n" in said),
    )


def _biosnoop(device: int, name: str) -> Running:
    return LineTracer(
        with_tracing(["biosnoop-bpfcc", "-d", name]),
        row=r"^\d+\.\d+ .* [RW] ",
        lost=r"^Possibly lost (\d+) samples",
        environment={"PYTHONUNBUFFERED": "1"},
        is_attached=_loaded_for_a_while(lambda said: "LAT(ms)" in said),
    )


def _loaded_for_a_while(has_begun: Callable[[str], bool]) -> Callable[[int, str], bool]:
    """Attached is a tracer that says it has begun and has held programs for some time."""
    since: list[float] = []

    def is_attached(pid: int, said: str) -> bool:
        if not since and has_begun(said) and programs.held_by(pid):
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= _ATTACHING_SECONDS

    return is_attached
