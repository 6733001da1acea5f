"""The benchmarks run and say what they found in a form that can be read; no timing is judged."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import document, programs, quiet
from benchmarks.harness.document import Column, Outcome, Table
from benchmarks.harness.estimate import median_interval
from kvprobe.bpf import trial
from kvprobe.model import Interval

ROOT = Path(__file__).parents[2]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )


@pytest.mark.root
def test_quick_decode_writes_what_it_measured(tmp_path: Path) -> None:
    done = run("decode", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "decode.json").read_text())
    assert written["schema_version"] == document.SCHEMA_VERSION
    assert written["benchmark"] == "decode"
    assert {"date", "kernel", "cpu", "memory", "load", "versions"} <= written["machine"].keys()
    (table,) = written["tables"]
    measured = {row["method"]: row for row in table["rows"]}
    for method in ("kvprobe, simulated ring", "kvprobe, BPF ring"):
        ns = measured[method]["ns_per_row"]
        assert 0 < ns["low"] <= ns["mid"] <= ns["high"]
        assert ns["n"] == measured[method]["samples"] >= 3
        assert measured[method]["rows_per_second"] == pytest.approx(1e9 / ns["mid"])
    assert [aim["met"] in (True, False) for aim in written["aims"]] == [True, True]
    assert "a quick run: too short to quote a figure from" in written["notes"]
    assert (tmp_path / "decode.txt").read_text() in done.stdout + "\n"


def test_an_unknown_benchmark_is_named() -> None:
    done = run("nonsense")
    assert done.returncode == 2
    assert (
        "no benchmark 'nonsense'; there are: decode, logs, recording, startup, tracers"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_what_is_no_number_is_null_in_json_and_a_dash_in_text() -> None:
    columns = (Column("name", "name"), Column("share", "share", ".1f", 100), Column("n", "n", "d"))
    rows: tuple[dict[str, Any], ...] = (
        {"name": "known", "share": Interval(0.5, 0.25, 0.75, 5), "n": 7},
        {"name": "unknown", "share": Interval(math.nan, math.nan, math.nan, 0), "n": None},
        {"name": "absent"},
    )
    outcome = Outcome(tables=[Table("title", columns, rows)])
    written = document.as_json("x", {}, outcome)
    json.dumps(written, allow_nan=False)
    assert [row["n"] for row in written["tables"][0]["rows"]] == [7, None, None]
    assert written["tables"][0]["rows"][1]["share"]["mid"] is None
    lines = [line.split() for line in document.as_text("x", {}, outcome).splitlines()]
    assert ["known", "50.0", "[25.0,", "75.0]", "7"] in lines
    assert ["unknown", "-", "-"] in lines
    assert ["absent", "-", "-"] in lines


@pytest.mark.parametrize(("n", "level"), [(1, 0.0), (5, 0.9375), (7, 0.984375), (23, 0.9)])
def test_interval_covers_the_median_as_often_as_it_says(n: int, level: float) -> None:
    """Of a skewed distribution, so that nothing symmetric helps; its true median is ln 2."""
    generator = np.random.default_rng(17)
    intervals = [median_interval(generator.exponential(size=n).tolist()) for _ in range(3001)]
    assert intervals[0].level >= level
    covered = sum(i.low <= math.log(2) <= i.high for i in intervals) / len(intervals)
    assert covered == pytest.approx(intervals[0].level, abs=0.025)


def test_children_are_ours_and_orphans_are_foreign() -> None:
    busy = "import os, time; print(os.getpid(), flush=True); end = time.monotonic() + 5\n"
    busy += "while time.monotonic() < end: pass"
    leave_it = "import os, sys\nif os.fork() == 0: os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-c", leave_it, sys.executable, "-c", busy]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        parent.wait()
        orphan = int(parent.stdout.readline())
        try:
            load = quiet.ForeignLoad()
            time.sleep(1)
            assert load.share() > 0.1
            assert orphan not in quiet.family()
        finally:
            os.kill(orphan, signal.SIGKILL)
    with subprocess.Popen(["sleep", "5"]) as child:
        assert {child.pid, os.getpid()} <= quiet.family()
        assert os.getppid() not in quiet.family()
        child.kill()


@pytest.mark.root
def test_programs_of_a_process_are_found_with_their_names() -> None:
    before = programs.held_by(os.getpid())
    descriptor = trial.program()
    try:
        (number,) = programs.held_by(os.getpid()) - before
        assert programs.runs_of(frozenset({number}))[number].runs == 0
    finally:
        os.close(descriptor)
    assert programs.held_by(os.getpid()) == before
