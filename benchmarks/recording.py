"""What ``kvprobe capture`` uses while it records, and how large its file is, by row rate.

fio reads 4 KiB at a fixed rate; each read makes two rows, one of ``ops`` and one of ``block``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.harness import quiet
from benchmarks.harness.capture import Captured, capture
from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from benchmarks.harness.estimate import median_interval
from benchmarks.harness.load import Reading, Target, memory_target, reading
from kvprobe.bpf.governor import BUDGET_REQUESTS, BUDGET_SHARE
from kvprobe.model import Interval

_ROWS_PER_READ = 2
_RATES = (0, 10_000, 100_000, 200_000)
"""Rows a second."""
_PATIENCE_SECONDS = 60.0


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Record at every rate.

    Raises:
        KvprobeError: no loop device, or kvprobe cannot capture here.
    """
    seconds, repeats = (1.0, 1) if quick else (10.0, 5)
    outcome = Outcome({"capture": f"-d {seconds:g} --device, all probes", "repeats": repeats})
    rows: list[dict[str, Value]] = []
    with memory_target() as target, tempfile.TemporaryDirectory(prefix="kvprobe-bench-") as folder:
        for rate in (10_000,) if quick else _RATES:
            say(f"{rate:,} rows/s")
            done = [_one(target, Path(folder), rate, seconds, quick) for _ in range(repeats)]
            rows.append(_row(rate, done))
            outcome.aims += _aims(rate, done)
    outcome.tables.append(Table("medians [90 % interval]", _COLUMNS, tuple(rows)))
    outcome.notes.append(
        "agent CPU is that of the recording, by its own account; the whole command also starts, "
        "packs the file and makes the report"
    )
    return outcome


_COLUMNS = (
    Column("rate", "asked rows/s", ",d"),
    Column("rows_per_second", "rows/s", ",.0f"),
    Column("agent_share", "agent CPU, % of a core", ".2f", 100),
    Column("agent_us_per_row", "us/row", ".3f"),
    Column("command_cpu_seconds", "whole command, CPU s", ".2f"),
    Column("segment_bytes_per_row", "recording B/row", ".1f"),
    Column("file_bytes_per_row", "file B/row", ".1f"),
    Column("file_bytes", "file MiB", ".2f", 2**-20),
    Column("peak_bytes", "peak MiB", ".0f", 2**-20),
    Column("lost", "lost", ",d"),
)


def _one(target: Target, folder: Path, rate: int, seconds: float, quick: bool) -> Captured:
    quiet.wait_until_quiet(1.0 if quick else 60.0)
    how = Reading(4096, 8, seconds + _PATIENCE_SECONDS, max(1, rate // _ROWS_PER_READ))
    with reading(target, how) if rate else nullcontext():
        return capture(target, folder, seconds)


def _row(rate: int, done: Sequence[Captured]) -> dict[str, Value]:
    row: dict[str, Value] = {
        "rate": rate,
        "rows_per_second": _median(done, lambda c: c.rows / c.recorded_seconds),
        "agent_share": _share(done),
        "command_cpu_seconds": _median(done, lambda c: c.command_cpu_seconds),
        "peak_bytes": max(c.peak_bytes for c in done),
        "lost": sum(c.lost for c in done),
        "file_bytes": max(c.file_bytes for c in done),
    }
    if rate:
        row["agent_us_per_row"] = _median(done, lambda c: 1e6 * c.agent_cpu_seconds / c.rows)
        row["file_bytes_per_row"] = _median(done, lambda c: c.file_bytes / c.rows)
        kept = [c.segment_bytes_per_row for c in done if c.segment_bytes_per_row is not None]
        row["segment_bytes_per_row"] = median_interval(kept)
    return row


def _aims(rate: int, done: Sequence[Captured]) -> list[Aim]:
    """The budget that kvprobe's governor keeps to, here without a governor."""
    share = _share(done)
    budget = BUDGET_SHARE * max(1.0, rate / _ROWS_PER_READ / BUDGET_REQUESTS)
    return [
        Aim(
            f"agent within {budget:.0%} of a core at {rate:,} rows/s",
            f"{share.mid:.2%} [{share.low:.2%}, {share.high:.2%}]",
            share.mid <= budget,
        )
    ]


def _share(done: Sequence[Captured]) -> Interval:
    return _median(done, lambda c: c.agent_cpu_seconds / c.recorded_seconds)


def _median(done: Sequence[Captured], figure: Callable[[Captured], float]) -> Interval:
    return median_interval([figure(c) for c in done])
