"""Differences of in-kernel sums when the kernel changes them while they are read."""

from typing import Any

import numpy as np
import pytest

from kvprobe.bpf import aggregates, maps
from kvprobe.bpf.aggregates import DEPTHS, Aggregates

NOT_READ = 2


def test_a_change_after_now_leaves_every_interval_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Depth 0 to 97, then 3; the second look comes 31 ns after the time that it stands for."""
    sums = {0: np.zeros(2 + DEPTHS, np.uint64), 1: np.zeros(2 + DEPTHS, np.uint64)}

    def element(which: Any, index: int, _: int) -> Any:
        if which == "depth":
            return sums[index].copy()
        return np.zeros(NOT_READ * aggregates.SIZES * aggregates.LATENCIES, np.uint64)

    monkeypatch.setattr(maps, "array_element", element)
    monkeypatch.setattr(Aggregates, "_devices", lambda self: [(7, 0)])
    seen = Aggregates({"block_depth": "depth", "block_histogram": "histogram"}, 0)  # type: ignore[dict-item]

    def times(now: int) -> dict[int, int]:
        rows = seen.read(now)["depth"]
        mine = rows[rows["direction"] == 0]
        return dict(zip(mine["depth"].tolist(), mine["time_ns"].tolist(), strict=True))

    sums[0][:2], sums[0][2] = (97, 3), 97
    assert times(101) == {0: 97, 3: 4}
    # depth 3 until 503 and nothing since then; 472 is what the look stands for
    sums[0][:2], sums[0][2 + 3] = (503, 0), 406
    first = times(472)
    second = times(600)
    assert sum(first.values()) + sum(second.values()) == 600 - 101
    assert min([*first.values(), *second.values()]) > 0
    assert sum(second.values()) <= 600 - 472 + 31


def test_a_late_look_at_a_depth_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is below zero: the interval has exactly its length."""
    words = np.zeros(2 + DEPTHS, np.uint64)
    words[:3] = 1031, 0, 1031  # idle throughout; a request came and went at 1031, after now

    monkeypatch.setattr(
        maps,
        "array_element",
        lambda which, index, _: (
            words.copy()
            if which == "depth"
            else np.zeros(NOT_READ * aggregates.SIZES * aggregates.LATENCIES, np.uint64)
        ),
    )
    monkeypatch.setattr(Aggregates, "_devices", lambda self: [(7, 0)])
    seen = Aggregates({"block_depth": "depth", "block_histogram": "histogram"}, 0)  # type: ignore[dict-item]
    assert seen.read(1009)["depth"]["time_ns"].tolist() == [1009, 1009]


def test_a_device_first_used_after_a_look_has_no_time_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = np.zeros(2 + DEPTHS, np.uint64)
    devices: list[tuple[int, int]] = []
    monkeypatch.setattr(
        maps,
        "array_element",
        lambda which, index, _: (
            words.copy()
            if which == "depth"
            else np.zeros(NOT_READ * aggregates.SIZES * aggregates.LATENCIES, np.uint64)
        ),
    )
    monkeypatch.setattr(Aggregates, "_devices", lambda self: devices)
    seen = Aggregates({"block_depth": "depth", "block_histogram": "histogram"}, 0)  # type: ignore[dict-item]
    assert not len(seen.read(1009)["depth"])
    devices.append((7, 0))
    words[:4] = 1213, 0, 1201, 12  # the kernel counts from the session's start
    rows = seen.read(1301)["depth"]
    mine = rows[rows["direction"] == 0]
    assert mine["time_ns"].tolist() == [1201 - 1009 + 1301 - 1213, 12]
