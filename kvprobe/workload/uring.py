"""Reads through io_uring by its system calls alone.

liburing's queue helpers are inline C and so not reachable from Python; the kernel interface is two
system calls and three mapped areas, which needs less than a compiled binding would.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time

from kvprobe.errors import ExitCode, KvprobeError

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_GETEVENTS = 1
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_OP_READ = 22
_PARAMS_BYTES = 120
_SQE = struct.Struct("=BBHiQQIIQ24x")
_CQE = struct.Struct("=QiI")

_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _setup(entries: int) -> tuple[int, tuple[int, ...]]:
    """Ring descriptor and the 30 words of ``struct io_uring_params``.

    With deferred task work, completions appear only during our own calls, so that reading them
    needs no memory barrier; kernels before 6.1 refuse it and get a plain ring.
    """
    for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, 0):
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        struct.pack_into("=I", params, 8, flags)
        try:
            fd = _syscall(_SETUP, ctypes.c_uint(entries), params)
        except OSError as error:
            if flags and error.errno == errno.EINVAL:
                continue
            raise
        return fd, struct.unpack("=30I", params.raw)
    raise AssertionError


class Ring:
    """One io_uring, for one thread, with ``depth`` page-aligned buffers of ``unit_bytes``."""

    def __init__(self, depth: int, unit_bytes: int) -> None:
        """Set the ring up.

        Raises:
            KvprobeError: the kernel has no io_uring or forbids it.
        """
        try:
            self._fd, words = _setup(depth)
        except OSError as error:
            raise KvprobeError(
                f"io_uring is not available: {error.strerror}",
                "use --io sync, or see sysctl kernel.io_uring_disabled",
                ExitCode.UNSUPPORTED,
            ) from None
        self.depth, self._unit_bytes = depth, unit_bytes
        sq_entries, cq_entries = words[0], words[1]
        self._sq_tail_at, self._sq_mask, array_at = words[11] // 4, sq_entries - 1, words[16]
        cq_head, cq_tail, _, _, _, self._cqes_at = words[20:26]
        self._cq_head_at, self._cq_tail_at, self._cq_mask = (
            cq_head // 4,
            cq_tail // 4,
            cq_entries - 1,
        )
        sq_area = self._map(array_at + 4 * sq_entries, _OFF_SQ_RING)
        self._cq_area = self._map(self._cqes_at + _CQE.size * cq_entries, _OFF_CQ_RING)
        self._sqes = self._map(_SQE.size * sq_entries, _OFF_SQES)
        self._sq = memoryview(sq_area)[: array_at + 4 * sq_entries].cast("I")
        self._cq = memoryview(self._cq_area)[: self._cqes_at].cast("I")
        for index in range(sq_entries):
            self._sq[array_at // 4 + index] = index
        size = -(-unit_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = [mmap.mmap(-1, size) for _ in range(depth)]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in memory]
        self.buffers = [memoryview(area)[:unit_bytes] for area in memory]
        self._unsubmitted = 0

    def _map(self, size: int, offset: int) -> mmap.mmap:
        return mmap.mmap(
            self._fd,
            size,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )

    def prepare_read(self, fd: int, slot: int) -> int:
        """Queue a read of one unit from the start of ``fd`` into buffer ``slot``; the time now."""
        tail = self._sq[self._sq_tail_at]
        _SQE.pack_into(
            self._sqes,
            (tail & self._sq_mask) * _SQE.size,
            _OP_READ,
            0,
            0,
            fd,
            0,
            self._addresses[slot],
            self._unit_bytes,
            0,
            slot,
        )
        self._sq[self._sq_tail_at] = (tail + 1) & 0xFFFFFFFF
        self._unsubmitted += 1
        return time.monotonic_ns()

    def submit_and_wait(self, least: int) -> list[tuple[int, int, int]]:
        """Submit what is queued, wait for ``least`` completions: (slot, result, time in ns)."""
        if not least and not self._unsubmitted:
            return []
        while True:
            try:
                self._unsubmitted -= _syscall(
                    _ENTER,
                    ctypes.c_uint(self._fd),
                    ctypes.c_uint(self._unsubmitted),
                    ctypes.c_uint(least),
                    ctypes.c_uint(_GETEVENTS),
                    None,
                    ctypes.c_size_t(0),
                )
            except InterruptedError:
                continue
            if self._cq[self._cq_tail_at] != self._cq[self._cq_head_at] or not least:
                break
        end_ns = time.monotonic_ns()
        done = []
        head = self._cq[self._cq_head_at]
        while head != self._cq[self._cq_tail_at]:
            at = self._cqes_at + (head & self._cq_mask) * _CQE.size
            slot, result, _ = _CQE.unpack_from(self._cq_area, at)
            done.append((slot, result, end_ns))
            head = (head + 1) & 0xFFFFFFFF
        self._cq[self._cq_head_at] = head
        return done

    def close(self) -> None:
        """Give the ring back."""
        os.close(self._fd)
