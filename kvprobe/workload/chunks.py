"""Chunk files, read and written call by call as vLLM's file-system tier does.

Each call is timed just outside the system call and put in the truth log with its result.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvprobe.engines import vllm
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.workload.journal import TruthLog

ALIGN_BYTES = 4096
STAMP_BYTES = 32

_libc = ctypes.CDLL(None, use_errno=True)
_now = time.monotonic_ns


@dataclass(frozen=True)
class Place:
    """Where and how chunks are kept: ``base`` as in ``engines.vllm.base_path``."""

    base: str
    unit_bytes: int
    direct: bool

    def path(self, key: str) -> str:
        """The chunk's file."""
        return vllm.chunk_path(self.base, key)

    @property
    def flags(self) -> int:
        """Extra open flags."""
        return os.O_DIRECT if self.direct else 0


class Inventory:
    """Which chunks are stored, least recently used first; shared by all threads."""

    def __init__(
        self, unit_bytes: int, capacity_bytes: int | None, stored: Iterable[str] = ()
    ) -> None:
        """Start with the chunks in ``stored``; no bound where ``capacity_bytes`` is None."""
        self._most = None if capacity_bytes is None else capacity_bytes // unit_bytes
        self._keys: OrderedDict[str, None] = OrderedDict.fromkeys(stored)
        self._pending: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def touch(self, key: str) -> None:
        """Mark as just used, when it is there."""
        with self._lock:
            if key in self._keys:
                self._keys.move_to_end(key)

    def claim(self, key: str) -> bool:
        """Whether to store this chunk: false while another thread does; ended by ``add``."""
        with self._lock:
            free = key not in self._pending
            self._pending.add(key)
            return free

    def add(self, key: str) -> list[str]:
        """Enter a stored chunk; returns those that must go to stay within the capacity."""
        with self._lock:
            self._pending.discard(key)
            self._keys[key] = None
            self._keys.move_to_end(key)
            gone = []
            while self._most is not None and len(self._keys) > self._most:
                gone.append(self._keys.popitem(last=False)[0])
            return gone


class ChunkIO:
    """The calls of one thread; holds that thread's page-aligned buffer."""

    def __init__(self, place: Place, truth: TruthLog) -> None:
        """Allocate a buffer of one unit."""
        self.place = place
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._filled = False
        self._truth = truth
        self._tid = threading.get_native_id()
        self._memory = mmap.mmap(-1, -(-place.unit_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        self.buffer = memoryview(self._memory)[: place.unit_bytes]

    def exists(self, key: str, request: str | None, why: str) -> bool:
        """One ``access(2)``: is the chunk stored?"""
        path = self.place.path(key)
        raw = os.fsencode(path)
        start_ns = _now()
        failed = _libc.access(raw, os.F_OK)
        end_ns = _now()
        result = -ctypes.get_errno() if failed else 0
        self._log("lookup", why, request, key, path, result, start_ns, end_ns)
        return not failed

    def open_for_read(self, key: str, request: str | None) -> int:
        """Open a chunk; returns the descriptor or a negative errno."""
        path = self.place.path(key)
        start_ns = _now()
        try:
            fd = os.open(path, os.O_RDONLY | self.place.flags)
        except OSError as error:
            fd = -(error.errno or errno.EIO)
        self._log("open", "load", request, key, path, fd, start_ns, _now())
        return fd

    def load(self, key: str, request: str | None) -> int:
        """Open, read the whole unit with one call, close; returns bytes or a negative errno."""
        fd = self.open_for_read(key, request)
        if fd < 0:
            return fd
        start_ns = _now()
        try:
            result = os.readv(fd, [self.buffer])
        except OSError as error:
            result = -(error.errno or errno.EIO)
        end_ns = _now()
        os.close(fd)
        self.log_read(key, request, result, start_ns, end_ns)
        return result

    def log_read(
        self, key: str, request: str | None, result: int, start_ns: int, end_ns: int
    ) -> None:
        """Put one read in the truth log."""
        path = self.place.path(key)
        self._log("read", "load", request, key, path, result, start_ns, end_ns)

    def store(self, key: str, request: str | None) -> bool:
        """Store a chunk unless it is there: temporary file, one write, rename.

        Raises:
            OSError: no space, or the file system refused.
        """
        if self.exists(key, request, "store"):
            return False
        path = self.place.path(key)
        temporary = f"{path}_{os.getpid()}{self._tid:07d}.tmp"
        if not self._filled:
            self._filled = True  # bytes that no device can compress away
            self.buffer[:] = os.urandom(self.place.unit_bytes)
        self.buffer[:STAMP_BYTES] = bytes.fromhex(key)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | self.place.flags
        fd = self._create(temporary, flags, key, request)
        try:
            start_ns = _now()
            try:
                result = os.write(fd, self.buffer)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            end_ns = _now()
        finally:
            os.close(fd)
        self._log("write", "store", request, key, temporary, result, start_ns, end_ns)
        if result != self.place.unit_bytes:
            os.unlink(temporary)
            code = -result if result < 0 else errno.ENOSPC
            raise OSError(code, os.strerror(code), temporary)
        start_ns = _now()
        os.rename(temporary, path)
        self._log("rename", "store", request, key, path, 0, start_ns, _now())
        return True

    def _create(self, temporary: str, flags: int, key: str, request: str | None) -> int:
        folder = os.path.dirname(temporary)
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
        start_ns = _now()
        fd = os.open(temporary, flags, 0o644)
        self._log("open", "store", request, key, temporary, fd, start_ns, _now())
        return fd

    def evict(self, key: str) -> None:
        """Remove a chunk; one that is gone already is fine."""
        path = self.place.path(key)
        start_ns = _now()
        try:
            os.unlink(path)
            result = 0
        except OSError as error:
            result = -(error.errno or errno.EIO)
        self._log("unlink", "evict", None, key, path, result, start_ns, _now())

    def _log(
        self,
        kind: str,
        why: str,
        request: str | None,
        key: str,
        path: str,
        result: int,
        start_ns: int,
        end_ns: int,
    ) -> None:
        self.counts[kind] += 1
        moves = kind in ("read", "write")
        if moves and result > 0:
            self.bytes[kind] += result
        self._truth.operation(
            kind,
            why,
            request,
            key,
            path,
            self._tid,
            result,
            start_ns,
            end_ns,
            requested=self.place.unit_bytes if moves else 0,
            direct=self.place.direct and kind in ("open", "read", "write"),
        )


def is_stamped(key: str, buffer: memoryview) -> bool:
    """Whether a buffer starts with the stamp that ``store`` wrote for this chunk."""
    return bytes(buffer[:STAMP_BYTES]) == bytes.fromhex(key)


def check_alignment(unit_tokens: int, bytes_per_token: int) -> None:
    """Refuse a unit that direct I/O cannot take, with the arithmetic and the next size that fits.

    Raises:
        KvprobeError: the unit is not a multiple of 4096 bytes.
    """
    unit = unit_tokens * bytes_per_token
    if unit % ALIGN_BYTES == 0:
        return
    fits = unit_tokens
    while fits * bytes_per_token % ALIGN_BYTES:
        fits += 1
    raise KvprobeError(
        f"{unit_tokens} tokens x {bytes_per_token} B = {unit} B is not a multiple of "
        f"{ALIGN_BYTES} (remainder {unit % ALIGN_BYTES}): direct I/O needs whole blocks",
        f"--unit-tokens {fits} fits, or use --buffered as engines fall back to",
    )


def probe_direct(root: str) -> None:
    """Write one block with direct I/O to see whether the file system takes it.

    Raises:
        KvprobeError: it does not.
    """
    path = os.path.join(root, f".o_direct_probe_{os.getpid()}.tmp")
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, ALIGN_BYTES) as block:
                os.write(fd, block)
        finally:
            os.close(fd)
    except OSError as error:
        raise KvprobeError(
            f"direct I/O refused at {root}: {error.strerror}",
            "use --buffered, or a file system that takes O_DIRECT",
            ExitCode.UNSUPPORTED,
        ) from None
    finally:
        Path(path).unlink(missing_ok=True)
