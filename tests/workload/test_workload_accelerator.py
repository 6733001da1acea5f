"""The accelerator's log: what it says, when, and that it is written at the change."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.workload.accelerator import LINK_BYTES_PER_S, PREFILL_SHARES, AcceleratorLog

SIZE = 104_729_000


def read(path: Path) -> list[tuple[str, float, int]]:
    """Key, seconds since the first line, number."""
    first, *lines = path.read_text().splitlines()
    assert 0 <= time.monotonic_ns() - int(first.removeprefix("epoch ")) < 60e9
    rows = [line.split() for line in lines]
    assert all(row[:2] == ["value", "0"] for row in rows)
    return [(key, float(at), int(number)) for _, _, key, at, number in rows]


def test_each_change_is_in_the_file_when_it_happens(tmp_path: Path) -> None:
    log = AcceleratorLog(str(tmp_path / "log"))
    known = len(read(tmp_path / "log"))
    for works in (True, False):
        before = time.monotonic_ns()
        log.working(works)
        rows = read(tmp_path / "log")[known:]
        known += len(rows)
        assert {key: number for key, _, number in rows} == {
            key: number * works for key, number in PREFILL_SHARES.items()
        }
        epoch = int((tmp_path / "log").read_text().split()[1])
        assert all(before <= epoch + at * 1e9 + 1 <= time.monotonic_ns() + 2 for _, at, _ in rows)
    log.close()


def test_copies_share_one_link_and_last_as_long_as_their_bytes_say(tmp_path: Path) -> None:
    log = AcceleratorLog(str(tmp_path / "log"))
    began = time.monotonic()
    threads = [threading.Thread(target=log.copy, args=(SIZE,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    least = 5 * SIZE / LINK_BYTES_PER_S
    assert least <= time.monotonic() - began < least + 1
    steps = [(at, number) for key, at, number in read(tmp_path / "log") if key == "gpm21"]
    log.close()
    moved = sum(number * 2**20 * (end - at) for (at, number), (end, _) in pairwise(steps))
    assert moved == pytest.approx(5 * SIZE, rel=1e-5)


def test_without_a_file_nothing_is_copied(tmp_path: Path) -> None:
    log = AcceleratorLog(None)
    began = time.monotonic()
    log.copy(1 << 40)
    log.working(True)
    log.close()
    assert time.monotonic() - began < 1
    with pytest.raises(KvprobeError, match=r"cannot write .*nowhere"):
        AcceleratorLog(str(tmp_path / "nowhere" / "log"))


def test_a_line_costs_little(tmp_path: Path) -> None:
    log = AcceleratorLog(str(tmp_path / "log"))
    costs = []
    for number in range(997):
        began = time.perf_counter_ns()
        log.working(number % 2 == 0)
        costs.append(time.perf_counter_ns() - began)
    log.close()
    assert sorted(costs)[len(costs) // 2] < 200_000


def test_a_full_disk_is_blamed_on_the_log() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        AcceleratorLog("/dev/full")
    assert caught.value.filename == "/dev/full"
