"""Feeds: a live source polled in a thread, a capture replayed; trouble becomes a line."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvprobe import document
from kvprobe.capture import window as window_module
from kvprobe.capture.reader import Capture, open_capture
from kvprobe.capture.tables import Tables
from kvprobe.dashboard.feed import SPEEDS, LiveFeed, ReplayFeed
from kvprobe.errors import KvprobeError
from kvprobe.model import DeviceFacts, EngineFacts, Loss, NvmePath, ProgramCost
from kvprobe.sources import Batch
from tests.capture.fake_source import block_rows, lookup_rows, manifest, request_dicts
from tests.reports.recorded import REQUESTS, write_capture


def until(done: Callable[[], bool]) -> None:
    """Wait for a thread."""
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Source:
    """Seven block rows a poll and four requests at the first; breaks after ``polls`` polls."""

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.given = 0
        self.closed = 0
        self.engine = EngineFacts("vllm")
        self.devices: tuple[DeviceFacts, ...] = ()
        self.nvme_paths: tuple[NvmePath, ...] = ()
        self.gpu = None
        self.finished = False
        self.measured_ns = None
        self.start_ns = time.monotonic_ns()

    def poll(self) -> Batch:
        if self.given == self.polls:
            raise KvprobeError("the ring buffer of probe block is gone", "start kvprobe top again")
        self.given += 1
        rows = block_rows(7, 7 * self.given)
        first = {"requests": request_dicts(4)} if self.given == 1 else {}
        return Batch(time.monotonic_ns(), {"block": rows, **first})

    def losses(self) -> Mapping[str, Loss]:
        return {"block": Loss(7 * self.given, 3, 0)}

    def cost(self) -> tuple[ProgramCost, ...]:
        return (ProgramCost("block_done", 11, 11 * 163),)

    def close(self) -> Batch:
        self.closed += 1
        return Batch(0)


def count_rows(tables: Tables) -> Mapping[str, object]:
    """A document that only counts."""
    return {
        "block": len(tables.frame("block")["bytes"]),
        "requests": tables.frame("requests")["id"].tolist(),
        "engine": tables.manifest.engine,
        "cpu_ns": tables.manifest.cost.agent_cpu_ns,
    }


def test_a_live_source_is_polled_and_closed() -> None:
    source = Source(-1)
    feed = LiveFeed(source, manifest(source.start_ns), 60, count_rows, ("no probe nvme",))
    try:
        until(lambda: source.given >= 5)
        first = feed.snapshot()
        until(lambda: source.given >= 9)
        second = feed.snapshot()
    finally:
        feed.close()
    assert first.document is not None and second.document is not None
    for snapshot in (first, second):
        assert snapshot.document is not None
        assert snapshot.document["block"] % 7 == 0
        assert snapshot.problems == ("no probe nvme",)
        assert snapshot.position is None
    assert 35 <= first.document["block"] < second.document["block"]
    assert second.document["requests"] == ["req-0", "req-1", "req-2", "req-3"]
    assert second.document["engine"] == EngineFacts("vllm")
    assert 0 < first.document["cpu_ns"] < second.document["cpu_ns"]
    assert first.now_ns is not None and second.now_ns is not None
    assert first.now_ns < second.now_ns
    assert source.closed == 1


def test_a_source_that_breaks_is_a_line_and_its_rows_stay() -> None:
    source = Source(3)
    feed = LiveFeed(source, manifest(source.start_ns), 60, count_rows)
    try:
        until(lambda: bool(feed.snapshot().problems))
        snapshot = feed.snapshot()
    finally:
        feed.close()
    assert snapshot.problems == (
        "the source stopped: the ring buffer of probe block is gone; start kvprobe top again",
    )
    assert snapshot.document is not None
    assert snapshot.document["block"] == 21


def test_a_document_that_cannot_be_built_is_a_line() -> None:
    def build(tables: Tables) -> Mapping[str, object]:
        raise ZeroDivisionError("of\nthings")

    source = Source(-1)
    feed = LiveFeed(source, manifest(source.start_ns), 60, build)
    try:
        snapshot = feed.snapshot()
    finally:
        feed.close()
    assert snapshot.document is None
    assert snapshot.problems == ("this window cannot be read: ZeroDivisionError: of things",)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Capture]:
    path: Path = tmp_path_factory.mktemp("feed") / "node.kvcap"
    with open_capture(write_capture(path)) as opened:
        yield opened


def test_a_replay_ends_with_the_document_of_the_capture(capture: Capture) -> None:
    whole = document.build(capture)
    feed = ReplayFeed(capture, capture.manifest, 60, document.build, speed=64)
    try:
        until(lambda: (position := feed.snapshot().position) is not None and position.ended)
        snapshot = feed.snapshot()
    finally:
        feed.close()
    assert snapshot.document is not None
    assert len(snapshot.document["requests"]) == REQUESTS
    # Estimates depend on the order of rows in their last digits; what was measured does not.
    assert measured(snapshot.document) == measured(whole)
    slugs = [[f["slug"] for f in d["findings"]] for d in (snapshot.document, whole)]
    assert slugs[0] == slugs[1] != []
    start, end = capture.manifest.window_ns
    assert snapshot.position is not None
    assert snapshot.position.done_ns == snapshot.position.total_ns == end - start
    assert snapshot.now_ns == end


def measured(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of each request that are no estimates."""
    keys = ("tokens", "ttft_ns", "spans", "restore", "attribution", "t_arrival_ns")
    return {row["id"]: {key: row[key] for key in keys} for row in found["requests"]}


def test_a_replay_halts_goes_on_and_begins_anew(capture: Capture) -> None:
    feed = ReplayFeed(capture, capture.manifest, 60, count_rows, speed=1)
    try:
        until(lambda: feed._position().done_ns > 0)
        feed.pause(True)
        time.sleep(0.1)  # a poll that was on its way
        halted = feed._position().done_ns
        time.sleep(0.2)
        assert feed._position().done_ns == halted
        feed.pause(False)
        until(lambda: feed._position().done_ns > halted)
        feed.pause(True)
        feed.restart()
        assert feed._position().done_ns == 0
        assert feed.snapshot().document == count_rows_of_nothing(feed)
    finally:
        feed.close()


def count_rows_of_nothing(feed: ReplayFeed) -> Mapping[str, object]:
    """What ``count_rows`` says of an empty window."""
    manifest = feed._window.manifest
    return {
        "block": 0,
        "requests": [],
        "engine": manifest.engine,
        "cpu_ns": manifest.cost.agent_cpu_ns,
    }


def test_speeds_stay_within_their_list(capture: Capture) -> None:
    feed = ReplayFeed(capture, capture.manifest, 60, count_rows, speed=3)
    try:
        feed.change_speed(+1)
        assert feed._position().speed == 4
        feed.change_speed(-1)
        assert feed._position().speed == 2
        feed.change_speed(+99)
        assert feed._position().speed == SPEEDS[-1]
        feed.change_speed(-99)
        assert feed._position().speed == SPEEDS[0]
    finally:
        feed.close()


def test_many_lookups_shorten_the_window_only_above_the_limit_of_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_module, "_KEPT_ROWS", 29)
    monkeypatch.setattr(window_module, "MAX_ROWS", 131)
    window = window_module.Window(manifest(), seconds=7)
    start_ns, second_ns = window.manifest.start_ns, 10**9
    for second in range(1, 24):  # 13 rows a second: 7 s of them are more than 29, less than 131
        rows = lookup_rows([b"/mnt/kv/%d" % number for number in range(13)])
        window.add(Batch(start_ns + second * second_ns, {"lookups": rows}))
        whole = window.manifest.end_ns - window.manifest.start_ns
        assert whole == min(second, 7) * second_ns
    assert len(window.frame("lookups")["path"]) == 13 * 8
    for second in range(24, 31):  # 37 rows a second: 131 are three seconds of them
        rows = lookup_rows([b"/mnt/kv/%d" % number for number in range(37)])
        window.add(Batch(start_ns + second * second_ns, {"lookups": rows}))
    assert window.manifest.end_ns - window.manifest.start_ns == 3 * second_ns
    assert len(window.frame("lookups")["path"]) == 37 * 3
