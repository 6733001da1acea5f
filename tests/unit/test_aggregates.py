"""Differences of in-kernel sums when the kernel changes them while they are read."""

from typing import Any

import numpy as np
import pytest

from kvprobe.bpf import aggregates, maps
from kvprobe.bpf.aggregates import DEPTHS, Aggregates

NOT_READ = 2


Words = dict[int, np.ndarray[Any, np.dtype[np.uint64]]]
"""The kernel's words of each element of ``block_depth``: when, at which depth, time at each."""


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Words:
    """Both directions of one device, all zero; what a test writes there is what is read."""
    found = {0: np.zeros(2 + DEPTHS, np.uint64), 1: np.zeros(2 + DEPTHS, np.uint64)}
    histogram = np.zeros(NOT_READ * aggregates.SIZES * aggregates.LATENCIES, np.uint64)

    def element(which: Any, index: int, _: int) -> Any:
        return found[index].copy() if which == "depth" else histogram

    monkeypatch.setattr(maps, "array_element", element)
    monkeypatch.setattr(Aggregates, "_devices", lambda self: [(7, 0)])
    return found


@pytest.fixture
def seen() -> Aggregates:
    return Aggregates({"block_depth": "depth", "block_histogram": "histogram"}, 0)  # type: ignore[dict-item]


def test_a_change_after_now_leaves_every_interval_its_length(
    words: Words, seen: Aggregates
) -> None:
    """Depth 0 to 97, then 3; the second look comes 31 ns after the time that it stands for."""

    def times(now: int) -> dict[int, int]:
        rows = seen.read(now)["depth"]
        mine = rows[rows["direction"] == 0]
        return dict(zip(mine["depth"].tolist(), mine["time_ns"].tolist(), strict=True))

    words[0][:2], words[0][2] = (97, 3), 97
    assert times(101) == {0: 97, 3: 4}
    # depth 3 until 503 and nothing since then; 472 is what the look stands for
    words[0][:2], words[0][2 + 3] = (503, 0), 406
    first = times(472)
    second = times(600)
    assert sum(first.values()) + sum(second.values()) == 600 - 101
    assert min([*first.values(), *second.values()]) > 0
    assert sum(second.values()) <= 600 - 472 + 31


def test_a_late_look_at_a_depth_that_goes_on(words: Words, seen: Aggregates) -> None:
    """Nothing is below zero: the interval has exactly its length."""
    for each in words.values():  # idle throughout; a request came and went at 1031, after now
        each[:3] = 1031, 0, 1031
    assert seen.read(1009)["depth"]["time_ns"].tolist() == [1009, 1009]


def test_a_device_first_used_after_a_look_has_no_time_before_it(
    words: Words, seen: Aggregates, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[tuple[int, int]] = []
    monkeypatch.setattr(Aggregates, "_devices", lambda self: devices)
    assert not len(seen.read(1009)["depth"])
    devices.append((7, 0))
    for each in words.values():
        each[:4] = 1213, 0, 1201, 12  # the kernel counts from the session's start
    rows = seen.read(1301)["depth"]
    mine = rows[rows["direction"] == 0]
    assert mine["time_ns"].tolist() == [1201 - 1009 + 1301 - 1213, 12]
