"""How long it takes until something is seen, and how much memory it takes: kvprobe and bpftrace.

While fio reads steadily, a tracer is started; its first row carries the kernel's time, so the span
from starting the command to that row needs no co-operation of the tracer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import quiet
from benchmarks.harness.capture import capture
from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from benchmarks.harness.estimate import median_interval
from benchmarks.harness.load import Reading, Target, memory_target, reading
from benchmarks.rivals import Output, peak_bytes, reason
from benchmarks.rivals.command_line import with_tracing
from kvprobe.bpf import catalog
from kvprobe.errors import KvprobeError

AIM_FIRST_ROW_SECONDS = 2.0
_READS_PER_SECOND = 2000
_CHECKOUT = Path(__file__).parents[1]
_BPFTRACE = 'tracepoint:block:block_rq_complete {{ printf("row %llu\\n", nsecs); }}'
_PATIENCE_SECONDS = 60.0

_Sample = dict[str, float]


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Start everything that starts here, each in a fresh process.

    Raises:
        KvprobeError: no loop device, or kvprobe does not start.
    """
    repeats = 1 if quick else 9
    outcome = Outcome({"repeats": repeats, "load": f"{_READS_PER_SECOND} reads a second"})
    rows: list[dict[str, Value]] = []
    with memory_target() as target, tempfile.TemporaryDirectory(prefix="kvprobe-bench-") as folder:
        for what, one in _subjects(target, Path(folder)).items():
            say(what)
            samples = []
            try:
                for _ in range(repeats):
                    quiet.wait_until_quiet(1.0 if quick else 60.0)
                    samples.append(one())
            except KvprobeError as error:
                outcome.notes.append(f"{what}: {error.message}")
                continue
            keys = samples[0]
            rows.append({"what": what, **{key: _median(samples, key) for key in keys}})
            if what == _CAPTURE:
                outcome.aims.append(_aim(_median(samples, "first_row").mid))
    rings = sum(probe.ring_bytes for probe in catalog.available().values())
    outcome.notes.append(
        f"peak memory of kvprobe counts its {rings >> 20} MiB of ring buffers twice, as they are "
        "mapped twice in a row"
    )
    outcome.tables.append(Table("medians [90 % interval]", _COLUMNS, tuple(rows)))
    return outcome


_CAPTURE = "kvprobe capture"
_COLUMNS = (
    Column("what", "what"),
    Column("first_row", "to the first row, s", ".2f"),
    Column("whole", "whole run, s", ".2f"),
    Column("open", "load and attach, s", ".3f"),
    Column("close", "detach, s", ".3f"),
    Column("peak_bytes", "peak MiB", ".0f", 2**-20),
)


def _median(samples: list[_Sample], key: str) -> Any:
    return median_interval([sample[key] for sample in samples])


def _aim(seconds: float) -> Aim:
    return Aim(
        f"first traced row within {AIM_FIRST_ROW_SECONDS:g} s of starting capture",
        f"{seconds:.2f} s",
        seconds < AIM_FIRST_ROW_SECONDS,
    )


def _subjects(target: Target, folder: Path) -> dict[str, Callable[[], _Sample]]:
    """What is started, by what it is called."""
    return {
        "kvprobe --help": lambda: _command("--help"),
        "kvprobe doctor": lambda: _command("doctor"),
        _CAPTURE: lambda: _capture(target, folder, "auto"),
        "kvprobe capture --loader bcc": lambda: _capture(target, folder, "bcc"),
        "session, core loader": lambda: _session("core"),
        "session, bcc loader": lambda: _session("bcc"),
        "bpftrace, a line for each request": lambda: _bpftrace(target),
    }


def _command(*words: str) -> _Sample:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", *words],
        capture_output=True,
        text=True,
        cwd=_CHECKOUT,
        timeout=_PATIENCE_SECONDS,
    )
    whole = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise KvprobeError(reason(done.stderr))
    return {"whole": whole}


def _capture(target: Target, folder: Path, loader: str) -> _Sample:
    with reading(target, Reading(4096, 1, _PATIENCE_SECONDS, _READS_PER_SECOND)):
        done = capture(target, folder, 1.0, loader)
    if done.first_row_seconds is None:
        raise KvprobeError("the capture has no rows")
    return {"first_row": done.first_row_seconds, "peak_bytes": done.peak_bytes}


def _session(loader: str) -> _Sample:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals.session_start", loader],
        capture_output=True,
        text=True,
        cwd=_CHECKOUT,
        timeout=_PATIENCE_SECONDS,
    )
    if done.returncode:
        raise KvprobeError(reason(done.stderr))
    sample: _Sample = json.loads(done.stdout)
    return sample


def _bpftrace(target: Target) -> _Sample:
    out = Output()
    with reading(target, Reading(4096, 1, _PATIENCE_SECONDS, _READS_PER_SECOND)):
        began_ns = time.monotonic_ns()
        try:
            process = subprocess.Popen(
                with_tracing(["bpftrace", "-e", _BPFTRACE.format()]),
                stdin=subprocess.DEVNULL,
                stdout=out.descriptor,
                stderr=out.descriptor,
            )
        except OSError as error:
            raise KvprobeError(f"bpftrace: {error.strerror}") from error
        try:
            first = _first_row(process, out)
            peak = peak_bytes(process.pid)
        finally:
            process.kill()
            process.wait()
            out.close()
    return {"first_row": (first - began_ns) / 1e9, "peak_bytes": peak}


def _first_row(process: subprocess.Popen[bytes], out: Output) -> int:
    """The kernel's time of the first row that bpftrace prints."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (found := re.search(r"^row (\d+)$", out.text(), re.M)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise KvprobeError(reason(out.text()))
        time.sleep(0.05)
    return int(found.group(1))
