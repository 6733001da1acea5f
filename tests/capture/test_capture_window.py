"""Live, replayed and rolling: the same rows by other ways."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.bpf.governor import Thinning
from kvprobe.capture import Tables
from kvprobe.capture import window as window_module
from kvprobe.capture.frames import frame_from_rows, frame_length
from kvprobe.capture.reader import open_capture
from kvprobe.capture.redact import redact
from kvprobe.capture.window import Window
from kvprobe.schema import TABLES
from kvprobe.sources import Batch, Source
from kvprobe.sources.live import LiveSource
from kvprobe.sources.replay import ReplaySource
from tests.capture.fake_source import (
    START_NS,
    FakeSession,
    FakeSignal,
    block_rows,
    chunk_paths,
    lookup_rows,
    manifest,
)

SECOND = 1_000_000_000


def column(batch: Batch, table: str, name: str) -> list[Any]:
    """Values of a table that a replay delivered as a frame; none where it is not in the batch."""
    frame = batch.tables.get(table, {})
    assert isinstance(frame, dict)
    return frame[name].tolist() if frame else []


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def __call__(self) -> int:
        return self.now_ns


class CountingSampler:
    """A host sampler that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def sample(self) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        return [{"time_ns": 0, "metric": "asked", "subject": "", "value": self.asked}]


def test_a_live_source_samples_the_host_once_a_second() -> None:
    clock, sampler, session = Clock(), CountingSampler(), FakeSession(11, total=10_000)
    live = LiveSource(session, FakeSignal(), sampler, clock=clock)
    source: Source = live
    seen: dict[str, int] = {}
    for _ in range(100):
        for name, rows in source.poll().tables.items():
            seen[name] = seen.get(name, 0) + len(rows)
        clock.now_ns += SECOND // 50
    assert sampler.asked == 2
    assert seen == {"block": 1100, "depth": 2, "host": 2, "requests": 3, "keys": 3}
    assert source.engine is not None and source.engine.name == "vllm"
    assert (live.understood, live.ignored) == (3, 2)
    rest = source.close()
    assert session.closed and source.finished
    assert {name: len(rows) for name, rows in rest.tables.items()} == {
        "block": 11, "depth": 1, "host": 1, "requests": 1,
    }  # fmt: skip
    assert source.losses()["block"].rows == 1111
    assert source.losses()["requests"].rows == 4


def test_thinning_is_said() -> None:
    session = FakeSession(1)
    source = LiveSource(session)
    assert source.notes() == ()
    session.thinnings = [Thinning(1, 2, "so"), Thinning(2, 4, "7 rows lost"), Thinning(3, 2, "no")]
    assert source.notes() == ("block rows were thinned, at most to one in 4, because 7 rows lost",)


def test_a_replay_gives_every_row_once_and_at_its_time(whole: Path) -> None:
    clock = Clock()
    with open_capture(whole) as capture:
        replay = ReplaySource(capture, speed=2.0, clock=clock)
        expected = {name: frame_length(capture.frame(name)) for name in TABLES}
    source: Source = replay
    # The manifest's window is empty: all rows are clipped into it and come at the first poll.
    batch = source.poll()
    assert {name: len(column(batch, name, "tid")) for name in ("block", "ops")} == {
        "block": expected["block"], "ops": expected["ops"],
    }  # fmt: skip
    assert source.finished
    assert source.poll().tables == {}


class Recorded:
    """Block rows each 1000 ns, and facts with a window of 211000 ns."""

    def __init__(self) -> None:
        self.manifest = manifest()
        object.__setattr__(self.manifest, "end_ns", START_NS + 211_000)
        shuffled = np.random.default_rng(7).permutation(block_rows(211))
        self._block = frame_from_rows(TABLES["block"], shuffled)

    def frame(self, name: str) -> dict[str, Any]:
        return (
            self._block if name == "block" else {c.name: np.array([]) for c in TABLES[name].columns}
        )


@pytest.mark.parametrize("speed", [0.5, 1.0, 7.0])
def test_a_replay_keeps_the_pace(speed: float) -> None:
    clock = Clock()
    replay = ReplaySource(Recorded(), speed, clock)
    given: list[int] = []
    while not replay.finished:
        clock.now_ns += 10_000
        batch = replay.poll()
        rows = column(batch, "block", "done_ns")
        assert all(time <= batch.now_ns for time in rows)
        given += rows
        assert len(given) == min(211, int((clock.now_ns - START_NS) * speed / 1000) + 1)
    assert given == block_rows(211)["done_ns"].tolist()


def test_a_replay_halts_and_goes_on() -> None:
    clock = Clock()
    replay = ReplaySource(Recorded(), 1.0, clock)
    clock.now_ns += 50_500
    assert len(column(replay.poll(), "block", "tid")) == 51
    replay.speed = 0
    clock.now_ns += SECOND
    assert replay.poll().tables == {}
    replay.speed = 1
    clock.now_ns += 1000
    assert len(column(replay.poll(), "block", "tid")) == 1


def test_a_window_forgets_by_time() -> None:
    window = Window(manifest(), seconds=3)
    tables: Tables = window
    for second in range(10):
        rows = block_rows(101, 101 * second)
        window.add(Batch(START_NS + second * SECOND, {"block": rows}))
        tables.frame("block")  # reading in between must not change anything
    assert (tables.frame("block")["sector"] // 8).tolist() == list(range(606, 1010))
    assert tables.manifest.window_ns == (START_NS + 6 * SECOND, START_NS + 9 * SECOND)
    assert frame_length(tables.frame("ops")) == 0


def test_a_window_that_is_too_full_gets_shorter_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_module, "MAX_ROWS", 250)
    window = Window(manifest(), seconds=60)
    for second in range(10):
        rows = block_rows(101, 101 * second)
        window.add(Batch(START_NS + second * SECOND, {"block": rows}))
    assert (window.frame("block")["sector"] // 8).tolist() == list(range(808, 1010))
    assert window.manifest.start_ns > START_NS + 6 * SECOND


def test_a_window_keeps_the_names_of_open_files() -> None:
    window = Window(manifest(), seconds=1)
    window.add(Batch(START_NS, {"lookups": lookup_rows(chunk_paths(7))}))
    window.add(Batch(START_NS + 60 * SECOND, {"block": block_rows(3)}))
    frame = window.frame("lookups")
    assert len(frame["path"]) == 7
    assert frame["kv_key"][1] == f"abcde{1:011x}"
    assert frame["kv_temporary"].tolist() == [1, 0, 0, 1, 0, 0, 1]


def test_a_window_of_a_replay_equals_the_capture(whole: Path, tmp_path: Path) -> None:
    """Also of a redacted one, whose keys no recogniser would find again."""
    redact(whole, tmp_path / "redacted")
    for path in (whole, tmp_path / "redacted"):
        clock = Clock()
        with open_capture(path) as capture:
            replay = ReplaySource(capture, clock=clock)
            window = Window(capture.manifest, seconds=60)
            window.add(replay.poll(), replay)
            for name in TABLES:
                expected, frame = capture.frame(name), window.frame(name)
                assert set(frame) == set(expected)
                for column, values in expected.items():
                    if name != "keys":  # delivered when their requests arrive
                        assert values.tolist() == pytest.approx(
                            frame[column].tolist(), nan_ok=True
                        ), (name, column)
                assert sorted(expected) == sorted(frame)
            assert window.frame("lookups")["kv_key"][0] is not None
            assert window.manifest.engine == capture.manifest.engine
