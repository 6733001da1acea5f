"""One fio run over an existing file: random reads of one size at one depth."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from kvprobe.errors import ExitCode, KvprobeError

START_SECONDS = 0.5
"""What fio needs around the measurement."""
PATIENCE_SECONDS = 30.0
"""How long after its time a run may still be waiting for a device before it is given up."""
_VERSION = re.compile(r"fio-(\d+)\.(\d+)")
_OLDEST = (3, 0)
"""Older releases report run times in other units."""


@dataclass(frozen=True)
class Job:
    """What to measure. ``engine`` is fio's; psync reads with ``depth`` threads, others queue."""

    path: str
    file_bytes: int
    size_bytes: int
    depth: int
    direct: bool
    engine: str
    seconds: float
    seed: int


def version() -> str:
    """What ``fio --version`` says.

    Raises:
        KvprobeError: there is no fio, or it is too old or does not run.
    """
    hint = "install it: apt-get install fio"
    if shutil.which("fio") is None:
        raise KvprobeError("no fio on this machine", hint, ExitCode.UNSUPPORTED)
    said = _run(["fio", "--version"], 10.0).stdout.strip()
    found = _VERSION.match(said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise KvprobeError(f"fio is too old: {said or 'no version'}", hint, ExitCode.UNSUPPORTED)
    return said


def measure(job: Job) -> float:
    """Bytes/s of one run.

    Direct reads go anywhere for the whole time. Buffered ones read each block at most once, after
    the file was dropped from the page cache, so that the device and not memory is measured; they
    may end early.

    Raises:
        KvprobeError: fio failed, was killed or said nothing that can be understood.
    """
    done = _run(command(job), job.seconds + PATIENCE_SECONDS)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise KvprobeError(
            f"fio failed ({job.engine}, {job.size_bytes} B at depth {job.depth}): "
            f"{said[-1].strip() if said else f'exit {done.returncode}'}",
            "try the other of --direct and --buffered",
            ExitCode.UNSUPPORTED,
        )
    return parse(done.stdout)


def command(job: Job) -> list[str]:
    """The words of the fio command line."""
    threads = job.depth if job.engine == "psync" else 1
    stretch = job.file_bytes // threads // job.size_bytes * job.size_bytes
    words = [
        "fio",
        "--name=cell",
        f"--filename={job.path}",
        "--allow_file_create=0",
        "--rw=randread",
        "--randrepeat=1",
        f"--randseed={job.seed + 1}",
        f"--ioengine={job.engine}",
        f"--direct={int(job.direct)}",
        f"--bs={job.size_bytes}",
        f"--iodepth={job.depth // threads}",
        f"--size={stretch}",
        f"--runtime={max(1, round(job.seconds * 1000))}ms",
        "--invalidate=1",
        "--fadvise_hint=0",  # an engine gives no advice either: read-ahead stays as it is
        "--thread",
        "--group_reporting",
        "--output-format=json",
    ]
    if job.direct:
        words += ["--time_based", "--norandommap"]
    if threads > 1:
        words += [f"--numjobs={threads}", f"--offset_increment={stretch}"]
    return words


def parse(text: str) -> float:
    """Bytes/s from fio's JSON, which warnings may precede.

    Raises:
        KvprobeError: no JSON, another shape, an I/O error, or nothing was read.
    """
    try:
        document = json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])[0]
        (job,) = document["jobs"]
        failed, read = job.get("error", 0), job["read"]
        count, took_ms = _positive(read["io_bytes"]), _positive(read["runtime"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KvprobeError(
            "fio's answer cannot be understood",
            "run it by hand: fio --name=x --output-format=json ...",
            ExitCode.UNSUPPORTED,
        ) from error
    if failed:
        raise KvprobeError(
            f"fio met error {failed} while reading", "see dmesg", ExitCode.INCOMPLETE
        )
    return count / took_ms * 1000


def _positive(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(value)
    return number


def _run(words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KvprobeError(
            f"fio did not end within {seconds:.0f} s",
            "is the device stuck? see dmesg",
            ExitCode.INCOMPLETE,
        ) from error
    except OSError as error:
        raise KvprobeError(
            f"fio does not start: {error.strerror}", "reinstall fio", ExitCode.UNSUPPORTED
        ) from error
