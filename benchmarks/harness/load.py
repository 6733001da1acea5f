"""The load: fio reading one file, on a device that is limited by the processors or by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import KvprobeError
from kvprobe.workload import fio
from kvprobe.workload.scratch import scratch_filesystem

FILE_BYTES = 512 << 20
_MEMORY = "/dev/shm"
_PATIENCE_SECONDS = 60.0
_SEED = 20261


@dataclass(frozen=True)
class Target:
    """A file to read and the whole disk below it; ``device`` is the kernel's dev_t."""

    path: Path
    name: str
    device: int
    what: str

    def completed(self) -> int:
        """Reads and writes that the disk has completed, by its own count."""
        fields = Path(f"/sys/block/{self.name}/stat").read_text().split()
        return int(fields[0]) + int(fields[4])


@dataclass(frozen=True)
class Reading:
    """How fio reads: bytes at a time, in flight for each job, for how long at most.

    ``per_second`` None: all it can.
    """

    size_bytes: int
    depth: int
    seconds: float
    per_second: int | None = None
    jobs: int = 1


@dataclass(frozen=True)
class Read:
    """What fio says of its reads."""

    iops: float
    ios: int
    latency_ns: float
    p99_ns: float


@contextmanager
def memory_target() -> Iterator[Target]:
    """ext4 on a loop device over memory: the processors are the limit.

    Raises:
        KvprobeError: not root, no loop device, or too little memory.
    """
    try:
        room = shutil.disk_usage(_MEMORY).free
    except OSError:
        room = 0
    if room < 2 * FILE_BYTES:
        raise KvprobeError(f"{room >> 20} MiB are free in {_MEMORY}", "it takes 1 GiB of memory")
    with scratch_filesystem(FILE_BYTES + (128 << 20), _MEMORY) as scratch:
        if scratch.name is None or scratch.device is None:
            raise KvprobeError(f"no loop device: {scratch.why}", "run it as root")
        path = Path(scratch.root) / "data"
        _fill(path)
        yield Target(path, scratch.name, scratch.device, "ext4 on a loop device over memory")


@contextmanager
def disk_target() -> Iterator[Target]:
    """A file on the disk of the temporary folder: the device is the limit.

    Raises:
        KvprobeError: that folder is on no single block device, or on memory.
    """
    with tempfile.TemporaryDirectory(prefix="kvprobe-bench-", dir="/var/tmp") as folder:
        name, device = _disk_of(Path(folder))
        path = Path(folder) / "data"
        _fill(path)
        yield Target(path, name, device, f"file on disk {name}")


def read(target: Target, how: Reading) -> Read:
    """Run fio once.

    Raises:
        KvprobeError: fio is missing or fails.
    """
    try:
        done = subprocess.run(
            _command(target, how),
            capture_output=True,
            text=True,
            timeout=how.seconds + _PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KvprobeError(f"fio does not run: {error}", "apt-get install fio") from error
    if done.returncode:
        raise KvprobeError(f"fio failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    latency = report["clat_ns"]
    return Read(
        report["iops"], report["total_ios"], latency["mean"], latency["percentile"]["99.000000"]
    )


class Reader:
    """fio at work."""

    def __init__(self, process: subprocess.Popen[bytes], size_bytes: int) -> None:
        self._process = process
        self._size_bytes = size_bytes

    def ios(self) -> float:
        """I/Os submitted so far, by the kernel's account of that process.

        Raises:
            KvprobeError: it has ended.
        """
        if self._process.poll() is not None:
            raise KvprobeError("fio did not read until the end")
        for line in Path(f"/proc/{self._process.pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1]) / self._size_bytes
        raise KvprobeError("this kernel does not account I/O of processes")


@contextmanager
def reading(target: Target, how: Reading) -> Iterator[Reader]:
    """Let fio read meanwhile, for ``how.seconds`` at most.

    Raises:
        KvprobeError: fio is missing or ended by itself before.
    """
    try:
        process = subprocess.Popen(
            _command(target, how), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    except OSError as error:
        raise KvprobeError(f"fio does not run: {error}", "apt-get install fio") from error
    try:
        yield Reader(process, how.size_bytes)
        if process.poll() is not None:
            raise KvprobeError("fio did not read until the end")
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


def _command(target: Target, how: Reading) -> list[str]:
    job = fio.Job(
        str(target.path), FILE_BYTES, how.size_bytes, how.depth, True, "libaio", how.seconds, _SEED
    )
    rate = [] if how.per_second is None else [f"--rate_iops={how.per_second}"]
    return [*fio.command(job), f"--numjobs={how.jobs}", *rate]


def _fill(path: Path) -> None:
    """Random bytes, so that nothing below can take a short cut; not in the page cache after."""
    with path.open("wb") as file:
        for _ in range(FILE_BYTES >> 23):
            file.write(os.urandom(1 << 23))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_of(folder: Path) -> tuple[str, int]:
    """Name and dev_t of the whole disk that a folder is on."""
    number = os.stat(folder).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not node.exists():
        raise KvprobeError(
            f"{folder} is on no block device of its own", "no figures where the device is the limit"
        )
    if (node / "partition").exists():
        node = node.parent
    major, minor = (node / "dev").read_text().split(":")
    return node.name, int(major) << 20 | int(minor)
