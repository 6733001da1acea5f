"""SGLang's HiCacheFile: its pages are recognised, its look-ups and bytes counted exactly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.schema import LookupKind, OpKind
from kvprobe.workload.scratch import Scratch
from tests.live.engine_capture import Seen, capturing, seen
from tests.live.engine_process import EngineMissingError, python_of

PAGES, PAGE_BYTES = 37, 131_072
DRIVER = Path(__file__).parent / "drivers" / "sglang_files.py"


@pytest.fixture(scope="module")
def pages(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Seen]:
    """What was stored and loaded in the class's own words, and the capture of the loading."""
    try:
        site = next(Path(python_of("sglang")).parents[1].glob("lib/python3*/site-packages"))
        python = python_of("vllm")  # has torch
    except EngineMissingError as missing:
        pytest.skip(str(missing))
    root = Path(disk.root, "sglang")
    root.mkdir()

    def drive(way: str) -> Any:
        words = [python, DRIVER, site, root, PAGES, PAGE_BYTES, way]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    stored = drive("store")
    out = tmp_path_factory.mktemp("kvprobe-sglang") / "look.kvcap"
    with capturing(out, "--root", root, "--engine", "sglang"):
        loaded = drive("load")
    return stored, loaded, seen(out)


def test_read_bytes_are_the_pages(pages: tuple[Any, Any, Seen]) -> None:
    _, loaded, capture = pages
    ops = capture.ledger.ops
    assert loaded == {"hits": PAGES, "equal": PAGES, "bytes": PAGES * PAGE_BYTES}
    assert int(ops["result"][ops["kind"] < OpKind.WRITE].sum()) == loaded["bytes"]


def test_keys_are_the_engines(pages: tuple[Any, Any, Seen]) -> None:
    stored, _, capture = pages
    ops = capture.ledger.ops
    assert sorted(set(ops["key"].tolist())) == sorted(stored["keys"])


def test_hits_and_the_miss_are_seen(pages: tuple[Any, Any, Seen]) -> None:
    """``os.path.exists`` before each page, and for one that was never stored."""
    _, loaded, capture = pages
    lookups = capture.lookups
    known = np.array([key is not None for key in lookups["kv_key"]], bool)
    tests = known & (lookups["kind"] == LookupKind.STAT)
    keys = lookups["kv_key"][tests]
    hits = set(keys[lookups["result"][tests] == 0])
    assert len(hits) == loaded["hits"]
    assert set(keys) - hits == {"f" * 64}
