"""One loop-device file system for the whole folder, and short ways to run a workload on it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvprobe.signals.events import EventSignal
from kvprobe.workload.journal import read_truth
from kvprobe.workload.prefill import PrefillCost
from kvprobe.workload.prompts import Synthetic
from kvprobe.workload.run import Config, run_workload
from kvprobe.workload.scratch import Scratch, scratch_filesystem
from kvprobe.workload.shapes import PRESETS

REQUESTS = 29
UNIT_TOKENS = 26
"""With 2048 B a token: 13 blocks of 4096 B, a prime, as the number of requests."""


@dataclass
class Ran:
    """What one run left."""

    summary: dict[str, Any]
    header: dict[str, Any]
    truth: list[dict[str, Any]]
    requests: dict[str, dict[str, Any]]
    keys: list[dict[str, Any]]
    ignored: int

    def during(self, *kinds: str, why: str | None = None) -> list[dict[str, Any]]:
        return [
            row
            for row in self.truth
            if row["kind"] in kinds and row["phase"] == "run" and why in (None, row["why"])
        ]


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def device() -> Iterator[Scratch]:
    with scratch_filesystem(1 << 30) as scratch:
        assert scratch.name, scratch.why
        yield scratch


@pytest.fixture
def folder(device: Scratch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=device.root) as name:
        yield name


@pytest.fixture
def config(folder: str) -> Config:
    return Config(
        root=folder,
        shape=PRESETS["tiny"],
        unit_tokens=UNIT_TOKENS,
        synthetic=Synthetic(REQUESTS, prompt_tokens=400, sigma=0.4, prefixes=3, shared_share=0.7),
        cost=PrefillCost.parse("0.5,2,0.001"),
        warm="reused",
    )


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Run:
    def go(**changes: Any) -> Ran:
        events, truth = str(tmp_path / "events.jsonl"), str(tmp_path / "truth.jsonl")
        chosen = replace(config, events=events, truth=truth, **changes)
        summary = run_workload(chosen, lambda *_: None)
        header, rows = read_truth(truth)
        batch = EventSignal(events).close()
        requests = {str(row["id"]): dict(row) for row in batch.requests}
        return Ran(summary, header, rows, requests, [dict(k) for k in batch.keys], batch.ignored)

    return go
