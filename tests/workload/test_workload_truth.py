"""The truth is true: against wrapped system calls, the device's own counters, and the disk."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvprobe.engines import recognise
from kvprobe.workload import chunks
from kvprobe.workload.scratch import Scratch

from .conftest import REQUESTS, UNIT_TOKENS, Run

UNIT = UNIT_TOKENS * 2048
pytestmark = pytest.mark.root


def device_bytes(device: Scratch) -> tuple[int, int]:
    """Bytes read and written below the file system, as the kernel counts them."""
    words = Path(f"/sys/block/{device.name}/stat").read_text().split()
    return int(words[2]) * 512, int(words[6]) * 512


class Calls:
    """Counts the calls themselves, where Python makes them; knows nothing of the truth log."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        for name, kind in (("readv", "read"), ("write", "write")):
            patch.setattr(os, name, self._moving(getattr(os, name), kind))
        patch.setattr(os, "open", self._naming(os.open, "open"))
        patch.setattr(os, "unlink", self._naming(os.unlink, "unlink"))
        patch.setattr(os, "rename", self._naming(os.rename, "rename"))
        patch.setattr(chunks, "_libc", self)
        self._access = ctypes.CDLL(None, use_errno=True).access

    def access(self, raw: bytes, mode: int) -> int:
        self.counts["lookup"] += 1
        self.paths[os.fsdecode(raw)] += 1
        return int(self._access(raw, mode))

    def _moving(self, call: Any, kind: str) -> Any:
        def counted(fd: int, data: Any) -> int:
            done = int(call(fd, data))
            if len(data) == 1 or len(data) == UNIT:
                self.counts[kind] += 1
                self.bytes[kind] += done
            return done

        return counted

    def _naming(self, call: Any, kind: str) -> Any:
        def counted(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str) and recognise(path):
                self.counts[kind] += 1
            return call(path, *rest, **more)

        return counted


SHAPES = [
    {"concurrency": 1},
    {"concurrency": 4, "reads_in_flight": 3},
    {"concurrency": 16, "direct": False},
    {"concurrency": 4, "capacity_bytes": 61 * UNIT + 5},
    {"concurrency": 3, "lookup_every": True, "emit_keys": True},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_truth_has_each_call(run: Run, monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    calls = Calls(monkeypatch)
    ran = run(**shape)
    monkeypatch.undo()
    logged = Counter(row["kind"] for row in ran.truth)
    assert logged == calls.counts
    assert logged == Counter(ran.summary["operations"])
    moved = {kind: sum(r["result"] for r in ran.truth if r["kind"] == kind and r["result"] > 0)
             for kind in ("read", "write")}  # fmt: skip
    assert moved == dict(calls.bytes) == ran.summary["bytes"]
    assert calls.paths == Counter(r["path"] for r in ran.truth if r["kind"] == "lookup")
    assert moved["read"] % UNIT == 0 and moved["read"] > 100 * UNIT
    assert ran.summary["failed_reads"] == ran.summary["corrupt_reads"] == 0


@pytest.mark.parametrize("io", ["sync", "io_uring"])
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_direct_bytes_are_those_of_the_device(
    run: Run, device: Scratch, io: str, concurrency: int
) -> None:
    run(warm="all", warm_only=True)
    os.sync()
    before = device_bytes(device)
    ran = run(io=io, concurrency=concurrency, reads_in_flight=5, warm="none")
    read, written = (b - a for a, b in zip(before, device_bytes(device), strict=True))
    truth = sum(row["result"] for row in ran.during("read"))
    assert truth == ran.summary["bytes"]["read"] == ran.summary["tokens"]["restored"] * 2048
    assert truth > 300 * UNIT
    assert truth <= read <= truth * 1.001 + 4096
    assert ran.summary["bytes"]["write"] == 0, "all was stored before"
    assert written < 1 << 20, "nothing but the journal of the file system"


def test_stored_bytes_are_on_the_disk_and_the_device(
    run: Run, device: Scratch, folder: str
) -> None:
    os.sync()
    before = device_bytes(device)[1]
    ran = run(warm="none")
    written = device_bytes(device)[1] - before
    files = [path for path in Path(folder).rglob("*.bin")]
    truth = [row for row in ran.truth if row["kind"] == "write"]
    assert len(files) == len(truth) == ran.summary["chunks"]["stored"]
    assert {path.stat().st_size for path in files} == {UNIT}
    assert {row["key"] for row in truth} == {path.stem for path in files}
    assert all(path.read_bytes()[:32].hex() == path.stem for path in files)
    assert sum(row["result"] for row in truth) == len(files) * UNIT <= written
    assert not list(Path(folder).rglob("*.tmp"))


def test_buffered_reads_after_a_store_stay_in_memory_until_the_cache_is_dropped(
    run: Run, device: Scratch
) -> None:
    before = device_bytes(device)[0]
    ran = run(warm="all", direct=False)
    assert device_bytes(device)[0] - before < ran.summary["bytes"]["read"] / 100
    before = device_bytes(device)[0]
    ran = run(warm="none", direct=False, drop_caches=True)
    distinct = len({row["path"] for row in ran.during("read")})
    assert distinct * UNIT <= device_bytes(device)[0] - before <= distinct * UNIT * 1.2


def test_rows_are_well_formed(run: Run) -> None:
    ran = run(concurrency=3)
    assert ran.header["pid"] == os.getpid()
    assert ran.header["config"]["unit_tokens"] == UNIT_TOKENS
    for row in ran.truth:
        assert 0 < row["start_ns"] <= row["end_ns"]
        found = recognise(row["path"])
        assert found is not None and found.key == row["key"]
        assert found.temporary == (row["kind"] == "write" or (
            row["kind"] == "open" and row["why"] == "store"))  # fmt: skip
        assert row["direct"] == (row["kind"] in ("open", "read", "write"))
        assert (row["id"] is None) == (row["phase"] == "warm" or row["why"] == "evict")
        if row["kind"] in ("read", "write"):
            assert row["requested"] == row["result"] == UNIT
    renames = Counter(row["phase"] for row in ran.truth if row["kind"] == "rename")
    chunks = ran.summary["chunks"]
    assert renames == {"warm": chunks["warmed"], "run": chunks["stored"]}
    assert chunks["kept"] == chunks["warmed"] + chunks["stored"]
    lookups = ran.during("lookup", why="lookup")
    assert {row["result"] for row in lookups} == {0, -2}
    assert len({row["tid"] for row in lookups}) == 1, "one look-up thread"
    assert len({row["id"] for row in ran.during("read")}) > REQUESTS / 2
