"""io_uring by hand: results, order of slots, wrap-around, errors, buffered files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.workload import uring
from kvprobe.workload.uring import Ring

UNIT = 3 * 4096


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_many_reads_through_a_small_ring(tmp_path: Path, depth: int, flags: int) -> None:
    contents = [bytes([n]) * UNIT for n in range(53)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    ring = Ring(depth, UNIT)
    free = list(range(depth))
    waiting: dict[int, tuple[int, int, int]] = {}
    got: dict[int, bytes] = {}
    upcoming = iter(range(53))
    number = next(upcoming, -1)
    while number >= 0 or waiting:
        while free and number >= 0:
            fd = os.open(tmp_path / str(number), os.O_RDONLY | flags)
            slot = free.pop()
            waiting[slot] = (number, fd, ring.prepare_read(fd, slot))
            number = next(upcoming, -1)
        done = ring.submit_and_wait(1)
        assert done
        for slot, result, end_ns in done:
            which, fd, start_ns = waiting.pop(slot)
            assert result == UNIT and start_ns < end_ns
            got[which] = bytes(ring.buffers[slot])
            os.close(fd)
            free.append(slot)
    assert [got[n] for n in range(53)] == contents
    ring.close()


def test_short_reads_and_errors_are_results(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 101)
    ring = Ring(2, UNIT)
    fd = os.open(short, os.O_RDONLY)
    ring.prepare_read(fd, 0)
    ring.prepare_read(99_999, 1)
    results: dict[int, int] = {}
    while len(results) < 2:
        results |= {slot: result for slot, result, _ in ring.submit_and_wait(1)}
    assert results == {0: 101, 1: -errno.EBADF}
    assert ring.submit_and_wait(0) == []
    os.close(fd)
    ring.close()


def test_the_fallback_without_deferred_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = uring._syscall

    def old_kernel(number: int, *arguments: object) -> int:
        if number == uring._SETUP and arguments[1].raw[8:12] != bytes(4):  # type: ignore[attr-defined]
            raise OSError(errno.EINVAL, "flags")
        return real(number, *arguments)

    monkeypatch.setattr(uring, "_syscall", old_kernel)
    (tmp_path / "f").write_bytes(b"y" * UNIT)
    ring = Ring(1, UNIT)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    ring.prepare_read(fd, 0)
    assert [result for _, result, _ in ring.submit_and_wait(1)] == [UNIT]
    assert bytes(ring.buffers[0]) == b"y" * UNIT
    os.close(fd)
    ring.close()


def test_where_io_uring_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(uring, "_syscall", forbidden)
    with pytest.raises(KvprobeError, match="not available") as caught:
        Ring(1, UNIT)
    assert "--io sync" in caught.value.hint
