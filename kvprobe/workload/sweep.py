"""Measure the service surface of storage: bytes/s by read size and depth, bounded in time and room.

Each repeat measures every cell once, in an order of its own, so that a device that drifts (heat,
other users) spreads over all cells instead of tilting the surface. The file that is read never has
a name, so nothing is left behind however the process ends.
"""

from __future__ import annotations

import errno
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, variance

from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import ServiceCell
from kvprobe.sources.devices import PathStorage, storage_of
from kvprobe.workload import fio

MIN_REPEATS = 2
"""One repeat has no spread, so no interval."""
PRIOR_REPEATS = 4
MIN_READS = 16
"""Room in the file for that many reads of the largest size."""
FREE_SHARE = 0.5
"""The file takes at most this share of the free space: other writers must not run out of it."""
MIN_ROUNDS = 4
OVERRUN = 2.0
"""A sweep ends after this many times the announced duration, with the repeats it has."""
SECTOR_BYTES = 512
WRITE_BYTES_PER_S = 200e6
"""For the announcement: random data is made and written at about this rate."""
_PIECE_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done and how much there is."""


@dataclass(frozen=True)
class Plan:
    """What to measure; sizes in bytes. See ``check`` for what is accepted."""

    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    direct: bool = True
    seconds_per_cell: float = 1.0
    repeats: int = 3
    max_bytes: int = 512 << 20

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(size, depth) of every cell."""
        return [(size, depth) for size in self.sizes for depth in self.depths]

    @property
    def file_bytes(self) -> int:
        """Size of the file that is read."""
        return self.max_bytes // _PIECE_BYTES * _PIECE_BYTES

    @property
    def seconds(self) -> float:
        """How long it will take, about."""
        runs = len(self.cells) * self.repeats
        return self.file_bytes / WRITE_BYTES_PER_S + runs * (
            self.seconds_per_cell + fio.START_SECONDS
        )

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            KvprobeError: no cell, too few repeats, or a file too small for its reads.
        """
        if not self.cells or min(*self.sizes, *self.depths, 1) < 1:
            raise KvprobeError("a sweep needs sizes and depths above zero", "see --help")
        if self.repeats < MIN_REPEATS:
            raise KvprobeError(f"{self.repeats} repeats give no interval", "--repeats 2 or more")
        if not 0.05 <= self.seconds_per_cell <= 60:
            raise KvprobeError(
                f"{self.seconds_per_cell:g} s a cell is out of range", "0.05 to 60 seconds"
            )
        if any(size % SECTOR_BYTES for size in self.sizes):
            raise KvprobeError(
                f"read sizes must be multiples of {SECTOR_BYTES} B", "round --sizes up"
            )
        # Buffered, each block is read once: a few rounds of the deepest cell must find room.
        reads = MIN_READS if self.direct else max(MIN_READS, MIN_ROUNDS * max(self.depths))
        needed = reads * max(self.sizes)
        if self.file_bytes < needed:
            raise KvprobeError(
                f"{self.max_bytes} B are too few for reads of {max(self.sizes)} B",
                f"--max-bytes {math.ceil(needed / _PIECE_BYTES)}m or smaller --sizes",
            )


@dataclass(frozen=True)
class Sweep:
    """A measured surface and what it was measured on."""

    date: str
    storage: PathStorage
    plan: Plan
    repeats: int
    """Repeats that were completed; fewer than planned when time ran out."""
    fio_version: str
    deep_engine: str
    cells: tuple[ServiceCell, ...]


def run_sweep(folder: str, plan: Plan, progress: Progress = lambda *_: None) -> Sweep:
    """Measure the storage under a folder.

    Raises:
        KvprobeError: the plan or the folder does not do, there is no fio or no room, fio fails,
            or time ran out before two repeats were complete.
    """
    plan.check()
    fio_version = fio.version()
    storage = storage_of(folder)
    deadline = time.monotonic() + plan.seconds * OVERRUN + fio.PATIENCE_SECONDS
    with _scratch_file(folder, plan, progress) as path:
        engine = _deep_engine(path, plan)
        rates = _repeat_all(path, plan, engine, deadline, progress)
    complete = min(len(found) for found in rates.values())
    if complete < MIN_REPEATS:
        raise KvprobeError(
            f"the storage of {folder} is too slow: {complete} of {plan.repeats} repeats in time",
            "fewer --sizes and --depths",
            ExitCode.INCOMPLETE,
        )
    return Sweep(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        storage=storage,
        plan=plan,
        repeats=complete,
        fio_version=fio_version,
        deep_engine=engine,
        cells=tuple(_cells(plan, rates)),
    )


def _repeat_all(
    path: str, plan: Plan, deep_engine: str, deadline: float, progress: Progress
) -> dict[tuple[int, int], list[float]]:
    rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in plan.cells}
    total, done = len(plan.cells) * plan.repeats, 0
    for repeat in range(plan.repeats):
        order = random.Random(repeat).sample(plan.cells, len(plan.cells))
        for size, depth in order:
            if time.monotonic() > deadline:
                return rates
            progress("measuring", done, total)
            engine = "psync" if depth == 1 else deep_engine
            job = fio.Job(
                path,
                plan.file_bytes,
                size,
                depth,
                plan.direct,
                engine,
                plan.seconds_per_cell,
                seed=repeat,
            )
            rates[size, depth].append(fio.measure(job))
            done += 1
    progress("measuring", total, total)
    return rates


def _cells(plan: Plan, rates: Mapping[tuple[int, int], Sequence[float]]) -> list[ServiceCell]:
    """Geometric means of the repeats with 90 % t intervals on logarithms.

    Two or three repeats say little about their own spread, but all cells share one machine: each
    variance is drawn towards the mean variance of all, which counts as ``PRIOR_REPEATS`` further
    repeats (moderated t; Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3(1):3).
    """
    from scipy.special import stdtrit

    logs = {cell: [math.log(rate) for rate in found] for cell, found in rates.items()}
    own = {cell: variance(values) for cell, values in logs.items()}
    common = fmean(own.values())
    cells = []
    for (size, depth), values in logs.items():
        n, mid = len(values), fmean(values)
        freedom = n - 1 + PRIOR_REPEATS
        moderated = ((n - 1) * own[size, depth] + PRIOR_REPEATS * common) / freedom
        half = float(stdtrit(freedom, 0.95)) * math.sqrt(moderated / n)
        low, middle, high = (math.exp(x) for x in (mid - half, mid, mid + half))
        cells.append(ServiceCell(size, depth, plan.direct, middle, low, high, n, "sweep"))
    return cells


def _deep_engine(path: str, plan: Plan) -> str:
    """The first engine that works here: io_uring may be forbidden, libaio buffers are not queued.

    Without either, ``depth`` threads read, which is what most engines do anyway.
    """
    for engine in ("io_uring", "libaio") if plan.direct else ("io_uring",):
        job = fio.Job(path, plan.file_bytes, plan.sizes[0], 2, plan.direct, engine, 0.05, 0)
        with suppress(KvprobeError):
            fio.measure(job)
            return engine
    return "psync"


@contextmanager
def _scratch_file(folder: str, plan: Plan, progress: Progress) -> Iterator[str]:
    """A file without a name, full of random data; yields a path by which fio can open it."""
    file = _open_unnamed(folder)
    try:
        space = os.fstatvfs(file)
        free = space.f_bavail * space.f_frsize
        if plan.file_bytes > free * FREE_SHARE:
            room = int(free * FREE_SHARE) // _PIECE_BYTES
            raise KvprobeError(
                f"no room for {plan.file_bytes >> 20} MiB in {folder}: {free >> 20} MiB are free",
                f"--max-bytes {room}m" if room else "free some space",
                ExitCode.UNSUPPORTED,
            )
        path = f"/proc/{os.getpid()}/fd/{file}"
        if plan.direct:
            _try_direct(path, folder)
        _fill(file, plan.file_bytes, folder, progress)
        yield path
    finally:
        os.close(file)


def _open_unnamed(folder: str) -> int:
    try:
        with suppress(IsADirectoryError):  # a kernel or file system without O_TMPFILE
            try:
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        file, path = tempfile.mkstemp(prefix=".kvprobe-sweep-", dir=folder)
        os.unlink(path)
        return file
    except OSError as error:
        raise KvprobeError(
            f"cannot write in {folder}: {error.strerror}", "name a folder that you may write in"
        ) from error


def _try_direct(path: str, folder: str) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        raise KvprobeError(
            f"the file system of {folder} has no direct I/O", "--buffered", ExitCode.UNSUPPORTED
        ) from error


def _fill(file: int, count: int, folder: str, progress: Progress) -> None:
    """Real data: what was never written, or is all zero, some devices answer from a table."""
    try:
        for done in range(0, count, _PIECE_BYTES):
            if done % (16 * _PIECE_BYTES) == 0:
                progress("writing MiB", done >> 20, count >> 20)
            piece = memoryview(os.urandom(min(_PIECE_BYTES, count - done)))
            while piece:
                piece = piece[os.write(file, piece) :]
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise KvprobeError(
            f"cannot write in {folder}: {error.strerror}",
            "a smaller --max-bytes",
            ExitCode.UNSUPPORTED,
        ) from error
