"""From the library to the report: captures of each data path, and what doctor says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprobe import reports
from kvprobe.bpf import attach
from kvprobe.bpf.session import open_session
from kvprobe.capture.frames import frame_from_dicts, frame_from_rows
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.commands._diagnosis import gpu_direct_feature
from kvprobe.document import build
from kvprobe.model import Filters
from kvprobe.reports.text import render
from kvprobe.schema import TABLES
from kvprobe.sources.host import HostSampler
from tests.bpf.conftest import LoopFs, drain, loop_fs, retry_unseen  # noqa: F401
from tests.gds.cufile_process import HERE, Program, program
from tests.gds.test_nvidia_fs_stats import NEWEST, OFF
from tests.reports.schema_check import errors

MIB = 1 << 20
SCHEMA = json.loads((Path(reports.__file__).parent / "document.schema.json").read_text("utf-8"))
CALLS = [(n * 65537 % (6 * MIB), MIB + n) for n in range(53)]
BYTES = sum(size for _, size in CALLS)


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "path", "slugs"),
    [("compat", "compat", ["gds_compat_mode"]), ("invisible", "unknown", [])],
)
def test_a_capture_says_by_which_path_the_bytes_came(
    cufile: Path, kv_file: Path, tmp_path: Path, mode: str, path: str, slugs: list[str]
) -> None:
    out = tmp_path / "gds.kvcap"
    with program(cufile, mode) as it:
        with recording(it, out) as capture:
            it("register", name="a", path=str(kv_file))
            answer = it("transfer", name="a", places=CALLS)
            it("batch", name="a", places=[(0, 4099)] * 7)
        document = json.loads(capture["stdout"])
    assert list(errors(document, SCHEMA, SCHEMA)) == []
    assert [found["slug"] for found in document["findings"]] == slugs
    gds = document["gds"]
    assert gds["path"] == path
    reads = gds["reads"]
    assert (reads["calls"], reads["bytes"]) == (53, BYTES)
    assert sum(result for _, _, result in answer["done"]) == BYTES
    seen = mode == "compat"
    assert reads["below_bytes"] == seen * BYTES
    assert reads["unseen_bytes"] == (not seen) * BYTES
    assert (reads["handed_over"], reads["handed_over_bytes"]) == (7, 7 * 4099)
    assert reads["nameless_calls"] == reads["failed"] == gds["writes"]["calls"] == 0
    assert gds["driver"]["loaded"] is False
    notes = " ".join(document["capture"]["notes"])
    assert ("past both" in notes) is not seen
    assert "not timed" in notes
    text = subprocess.run(
        [sys.executable, "-m", "kvprobe", "report", str(out)],
        cwd=HERE.parents[1], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"path       {path}" in text and "53 calls, " in text


class recording:
    """``kvprobe capture`` of one process for as long as the block, its output afterwards."""

    def __init__(self, it: Program, out: Path) -> None:
        self._command = [sys.executable, "-m", "kvprobe", "capture", "-d", "60", "-o", str(out)]
        self._command += ["--pid", str(it.pid), "--redact", "--json"]
        self._said: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        self._process = subprocess.Popen(
            self._command, cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 30
        assert self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        talk = b""
        while b"recording" not in talk and time.monotonic() < deadline:
            talk += self._process.stderr.read() or b""
            time.sleep(0.05)
        assert b"recording" in talk, talk
        return self._said

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(2)
        assert self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), True)
        out, err = self._process.communicate(timeout=60)
        self._said.update(stdout=out.decode(), stderr=err.decode())


def document_of(rows: dict[str, Any], host: list[dict[str, Any]], filters: Filters) -> Any:
    frames = {name: frame_from_rows(TABLES[name], part) for name, part in rows.items()}
    frames["host"] = frame_from_dicts(TABLES["host"], host)
    end = time.monotonic_ns()
    manifest = Manifest("0", "id", end - 10**11, end, Clock(0), complete=True, filters=filters)
    return build(FixedTables(manifest, frames))


@pytest.fixture
def procfs(tmp_path: Path) -> Iterator[Path]:
    """A procfs whose driver has counted something before."""
    place = tmp_path / "proc"
    (place / "driver/nvidia-fs").mkdir(parents=True)
    (place / "driver/nvidia-fs/stats").write_text(NEWEST)
    yield place


@pytest.mark.root
def test_the_driver_s_counters_make_it_native(cufile: Path, kv_file: Path, procfs: Path) -> None:
    sampler = HostSampler(procfs)
    with program(cufile, "invisible") as it:
        filters = Filters(tgids=(it.pid,))
        with open_session(["cufile", "ops", "block"], filters, "core") as session:
            host = sampler.sample()
            it("register", name="a", path=str(kv_file))
            it("transfer", name="a", places=CALLS)
            stats = procfs / "driver/nvidia-fs/stats"
            grown = NEWEST.replace("n=7919 ok=7918", "n=7972 ok=7971")
            stats.write_text(grown.replace("readMiB=126703", f"readMiB={126703 + BYTES // MIB}"))
            rows = session.poll()
            host = [*host, *sampler.sample()]
    document = document_of(rows, host, filters)
    assert document["gds"]["path"] == "native"
    assert document["gds"]["driver"]["reads"] == 53
    assert document["gds"]["driver"]["read_bytes"] == BYTES // MIB * MIB
    assert document["gds"]["reads"]["unseen_bytes"] == BYTES
    assert document["findings"] == []
    assert "loaded; it counted reads 53, 53.0 MiB" in render(document)


@pytest.mark.root
@pytest.mark.parametrize("mode", ["inline", "compat"])
def test_block_requests_belong_to_the_call_and_count_once(
    cufile: Path,
    loop_fs: LoopFs,  # noqa: F811
    mode: str,
) -> None:
    places = [(n * MIB, MIB) for n in range(19)]

    @retry_unseen
    def attempt() -> None:
        path = loop_fs.file("gds", 19 * MIB)
        with program(cufile, mode) as it:
            filters = Filters(root=str(loop_fs.mountpoint), device=loop_fs.dev_t)
            names = ["cufile", "ops", "block", "lookups"]
            with open_session(names, filters, "core") as session:
                it("register", name="a", path=str(path), flags=os.O_RDONLY | os.O_DIRECT)
                it("transfer", name="a", places=places)
                it("deregister", name="a")
                rows = drain(session)
        reads = document_of(rows, [], Filters())["gds"]["reads"]
        assert (reads["calls"], reads["bytes"]) == (19, 19 * MIB)
        assert (reads["below_ops"], reads["below_bytes"]) == (19 * 16, 19 * MIB)
        assert reads["block_bytes"] == 19 * MIB
        assert reads["unseen_bytes"] == 0

    attempt()


@pytest.mark.root
def test_doctor_has_one_line(cufile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = gpu_direct_feature(tmp_path)
    assert nobody.state == "ok" and "libcufile.so is not here" in nobody.why
    with program(cufile, "compat"):
        bare = gpu_direct_feature()
        assert str(cufile) in bare.why and "nvidia-fs is not loaded" in bare.why
        monkeypatch.setattr(attach, "LIBRARY_EVENTS", tmp_path / "none")
        assert gpu_direct_feature().effect == "reads through cuFile are not seen"


@pytest.mark.parametrize(
    ("text", "state", "word"), [(NEWEST, "ok", "and counts"), (OFF, "degraded", "does not count")]
)
def test_doctor_says_whether_the_driver_counts(
    procfs: Path, monkeypatch: pytest.MonkeyPatch, cufile: Path, text: str, state: str, word: str
) -> None:
    (procfs / "driver/nvidia-fs/stats").write_text(text)
    mapped = procfs / "77" / "map_files"
    mapped.mkdir(parents=True)
    (mapped / "7f00-7f10").symlink_to(cufile)
    line = "7f00-7f10 r-xp 00000000 00:1b 11 /opt/venv/nvidia/cufile/lib/libcufile.so.0\n"
    (procfs / "77" / "maps").write_text(line)
    found = gpu_direct_feature(procfs)
    assert found.state == state and word in found.why
    assert found.why.startswith("/opt/venv/nvidia/cufile/lib/libcufile.so.0; nvidia-fs is loaded")
    assert bool(found.fix) is (state == "degraded")
