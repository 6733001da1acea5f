"""The sample document, and one built from a simulated node."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe import document
from kvprobe.capture.reader import open_capture
from tests.reports.make_sample_report import SAMPLE
from tests.reports.recorded import write_capture


@pytest.fixture
def sample() -> dict[str, Any]:
    """A fresh copy of ``tests/data/sample_report.json``."""
    found: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a capture of a simulated node; do not change it."""
    path: Path = tmp_path_factory.mktemp("reports") / "node.kvcap"
    with open_capture(write_capture(path)) as capture:
        return document.build(capture)
