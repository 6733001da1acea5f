"""``kvprobe capture`` as a user runs it, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.load import Target
from benchmarks.rivals import Output, peak_bytes, reason
from kvprobe.capture.part import part_of
from kvprobe.capture.reader import open_capture
from kvprobe.capture.segments import TornSegment, check_segment
from kvprobe.errors import KvprobeError

_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Captured:
    """What a capture cost and gave. Times in seconds, CPU of the recording itself only."""

    first_row_seconds: float | None
    """From starting the command to the first row in the file; None: it has no rows."""
    took_seconds: float
    recorded_seconds: float
    agent_cpu_seconds: float
    command_cpu_seconds: float
    """Of the whole command: start, recording, packing, report."""
    peak_bytes: int
    rows: int
    lost: int
    segment_bytes_per_row: float | None
    """On disk while recording."""
    file_bytes: int


def capture(target: Target, folder: Path, seconds: float, loader: str = "auto") -> Captured:
    """Record the disk of ``target``.

    Raises:
        KvprobeError: the command fails.
    """
    out, links = folder / "bench.kvcap", folder / "segments"
    links.mkdir()
    errors = Output()
    began_ns = time.monotonic_ns()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvprobe", "capture", "--json", "-o", str(out)),
            *("-d", f"{seconds:g}", "--device", target.name, "--loader", loader),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors.descriptor,
    )
    try:
        peak, used = _watch(process, out, links)
        took = (time.monotonic_ns() - began_ns) / 1e9
        if process.returncode != 0:
            raise KvprobeError(reason(errors.text()))
        return _examine(out, links, began_ns, took, peak, used)
    finally:
        process.kill()
        process.wait()
        errors.close()
        for path in (*links.iterdir(), out):
            path.unlink(missing_ok=True)
        links.rmdir()


def _watch(process: subprocess.Popen[bytes], out: Path, links: Path) -> tuple[int, float]:
    """Wait for the end; keep every segment by another name. Returns peak bytes, CPU seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    peak = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return peak, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            raise KvprobeError(f"kvprobe capture has not ended after {_PATIENCE_SECONDS:.0f} s")
        with suppress(OSError):  # it may be gone between any two steps
            peak = max(peak, peak_bytes(process.pid))
            for path in part_of(out).glob("*.seg"):
                if not (links / path.name).exists():
                    os.link(path, links / path.name)
        time.sleep(_LOOK_SECONDS)


def _examine(
    out: Path, links: Path, began_ns: int, took: float, peak: int, used: float
) -> Captured:
    kept_bytes = kept_rows = 0
    for path in links.iterdir():
        with suppress(TornSegment):
            kept_rows += sum(block.rows for block in check_segment(path).blocks)
            kept_bytes += path.stat().st_size
    with open_capture(out) as made:
        manifest = made.manifest
        firsts = [
            int(made.frame(table)[column].min())
            for table, column in (("block", "done_ns"), ("ops", "end_ns"))
            if len(made.frame(table)[column])
        ]
    cost = manifest.cost
    return Captured(
        first_row_seconds=(min(firsts) - began_ns) / 1e9 if firsts else None,
        took_seconds=took,
        recorded_seconds=(cost.wall_ns or 0) / 1e9,
        agent_cpu_seconds=(cost.agent_cpu_ns or 0) / 1e9,
        command_cpu_seconds=used,
        peak_bytes=peak,
        rows=sum(loss.rows for loss in manifest.losses.values()),
        lost=sum(loss.lost for loss in manifest.losses.values()),
        segment_bytes_per_row=kept_bytes / kept_rows if kept_rows else None,
        file_bytes=out.stat().st_size,
    )
