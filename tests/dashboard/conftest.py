"""A feed whose snapshots are given, and the sample document."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvprobe.dashboard.feed import Position, Snapshot
from tests.reports.make_sample_report import SAMPLE

Document = dict[str, Any]


@dataclass
class GivenFeed:
    """Gives ``current``; counts what is asked of it. ``gate`` may hold a snapshot back."""

    current: Snapshot
    calls: list[str] = field(default_factory=list)
    asked: int = 0
    gate: threading.Event | None = None
    failure: Exception | None = None

    def snapshot(self) -> Snapshot:
        self.asked += 1
        if self.gate is not None:
            self.gate.wait(5)
        if self.failure is not None:
            raise self.failure
        return self.current

    def pause(self, paused: bool) -> None:
        self.calls.append(f"pause {paused}")

    def change_speed(self, steps: int) -> None:
        self.calls.append(f"speed {steps:+d}")

    def restart(self) -> None:
        self.calls.append("restart")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def sample() -> Document:
    """A fresh copy of the sample document, with its last 61 requests."""
    found: Document = json.loads(SAMPLE.read_text(encoding="utf-8"))
    found["requests"] = found["requests"][-61:]
    return found


@pytest.fixture
def live(sample: Document) -> Snapshot:
    """The sample as a live source would give it."""
    capture = sample["capture"]
    return Snapshot(sample, capture["start_ns"] + capture["duration_ns"])


@pytest.fixture
def replayed(live: Snapshot) -> Snapshot:
    """The sample as a replay at 23 of 60 seconds."""
    return Snapshot(
        live.document, live.now_ns, (), Position(23 * 10**9, 60 * 10**9, 4.0, ended=False)
    )
