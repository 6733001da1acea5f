"""The sweep: known rates, bounded in time and room, nothing left behind; its file, whole or not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import cli
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.workload import fio, sweep
from kvprobe.workload.scratch import Scratch, scratch_filesystem
from kvprobe.workload.sweep import Plan, run_sweep
from kvprobe.workload.sweep_file import document, read_sweep
from kvprobe.workload.throttle import Limits, throttle

KIB, MIB = 1 << 10, 1 << 20
QUICK = Plan(
    sizes=(64 * KIB, 1 * MIB), depths=(1, 4), seconds_per_cell=0.1, repeats=2, max_bytes=32 * MIB
)


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> list[fio.Job]:
    """In place of fio: a device of 100 us and 1 GB/s a read, eight times as much at depth 8."""
    jobs: list[fio.Job] = []

    def measure(job: fio.Job) -> float:
        jobs.append(job)
        rate = job.depth * job.size_bytes / (100e-6 + job.size_bytes / 1e9)
        return rate * (1.0, 2.0, 4.0)[job.seed]

    monkeypatch.setattr(fio, "measure", measure)
    return jobs


# ---------------------------------------------------------------- figures


def test_cells_are_means_of_interleaved_repeats(tmp_path: Path, known_rates: list[fio.Job]) -> None:
    """Rates times 1, 2, 4: geometric mean 2, t interval of ln 2 / sqrt 3 with 2 + 4 degrees."""
    found = run_sweep(str(tmp_path), replace(QUICK, repeats=3))
    half = 1.943180 * math.log(2) / math.sqrt(3)
    assert [(c.size_bytes, c.depth) for c in found.cells] == QUICK.cells
    for cell in found.cells:
        rate = 2 * cell.depth * cell.size_bytes / (100e-6 + cell.size_bytes / 1e9)
        assert cell.bytes_per_s == pytest.approx(rate)
        assert cell.high_bytes_per_s == pytest.approx(rate * math.exp(half), rel=1e-4)
        assert cell.low_bytes_per_s == pytest.approx(rate / math.exp(half), rel=1e-4)
        assert (cell.n, cell.source, cell.direct) == (3, "sweep", True)
    runs = known_rates[1:]  # the first tried which engine works
    orders = [[(j.size_bytes, j.depth) for j in runs[i : i + 4]] for i in (0, 4, 8)]
    assert all(sorted(order) == sorted(QUICK.cells) for order in orders)
    assert len(set(map(tuple, orders))) > 1
    assert all((j.engine == "psync") == (j.depth == 1) for j in runs)


def test_a_cell_borrows_spread_from_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances ln(2)^2 / 2 and 0 with one degree; 1 : 4 towards their mean; t of 5 degrees."""
    monkeypatch.setattr(fio, "measure", lambda job: 1e6 * (job.depth if job.seed else 1))
    found = run_sweep(str(tmp_path), replace(QUICK, sizes=(MIB,), depths=(1, 2)))
    wide = math.log(2) ** 2 / 2
    for cell, own in zip(found.cells, (0.0, wide), strict=True):
        half = 2.015048 * math.sqrt((own + 4 * wide / 2) / 5 / 2)
        assert cell.high_bytes_per_s / cell.bytes_per_s == pytest.approx(math.exp(half), rel=1e-5)


@pytest.fixture
def small_device() -> Iterator[Scratch]:
    with scratch_filesystem(200 * MIB) as scratch:
        assert scratch.device is not None, scratch.why
        yield scratch


@pytest.mark.root
def test_a_known_limit_is_what_is_measured(small_device: Scratch) -> None:
    """37 MB/s below the file system, at any depth; the page cache adds nothing to it.

    The limit is kept by slices of a tenth of a second. Read-ahead may bring more than is asked.
    """
    limit = 37_000_000
    plan = Plan((256 * KIB,), (1, 4), True, 1.5, 2, 64 * MIB)
    assert small_device.device is not None
    with throttle(small_device.device, Limits(read_bytes_per_s=limit), [os.getpid()]):
        direct = run_sweep(small_device.root, plan)
        buffered = run_sweep(
            small_device.root, replace(plan, depths=(4,), seconds_per_cell=1.0, direct=False)
        )
    for cell in direct.cells:
        assert cell.bytes_per_s == pytest.approx(limit, rel=0.12)
    for cell in buffered.cells:
        assert 0.4 * limit < cell.bytes_per_s < 1.15 * limit
    assert direct.storage.device is not None
    assert direct.storage.device.name == small_device.name
    assert os.listdir(small_device.root) == ["lost+found"]


# ---------------------------------------------------------------- bounds


def test_no_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KvprobeError, match="no fio") as raised:
        run_sweep(str(tmp_path), QUICK)
    assert raised.value.exit_code == ExitCode.UNSUPPORTED and "install" in raised.value.hint


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError, match="No such file"):
        run_sweep(str(tmp_path / "nothing"), QUICK)


def test_a_folder_that_may_not_be_written_in() -> None:
    with pytest.raises(KvprobeError, match="cannot write in /proc"):
        run_sweep("/proc", QUICK)


def test_no_room(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(KvprobeError, match="no room") as raised:
        run_sweep(str(tmp_path), replace(QUICK, max_bytes=free.f_bavail * free.f_frsize))
    assert "--max-bytes" in raised.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": ()}, "sizes and depths"),
        ({"depths": (0,)}, "sizes and depths"),
        ({"repeats": 1}, "no interval"),
        ({"seconds_per_cell": 0.0}, "out of range"),
        ({"seconds_per_cell": math.nan}, "out of range"),
        ({"sizes": (1000,)}, "multiples of 512"),
        ({"max_bytes": 15 * MIB}, "too few"),
        ({"max_bytes": 127 * MIB, "direct": False, "depths": (32,)}, "too few"),
    ],
)
def test_plans_that_measure_nothing(change: dict[str, Any], words: str) -> None:
    with pytest.raises(KvprobeError, match=words):
        replace(QUICK, **change).check()


def test_default_plans_are_fine() -> None:
    Plan().check()
    Plan(direct=False).check()


def test_time_that_runs_out_ends_the_sweep(
    tmp_path: Path, known_rates: list[fio.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three repeats fit: they are the result; one alone is none."""
    clock = iter([0.0] + [1.0] * 9 + [1e9] * 9)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    found = run_sweep(str(tmp_path), replace(QUICK, repeats=3))
    assert found.repeats == 2 and {cell.n for cell in found.cells} <= {2, 3}
    clock = iter([0.0] + [1.0] * 5 + [1e9] * 9)
    with pytest.raises(KvprobeError, match="too slow: 1 of 3") as raised:
        run_sweep(str(tmp_path), replace(QUICK, repeats=3))
    assert raised.value.exit_code == ExitCode.INCOMPLETE


def test_a_failing_fio_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bin"
    bad.mkdir()
    (bad / "fio").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fio-3.33 && exit\necho fio: no luck >&2\nexit 1\n'
    )
    (bad / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bad}:{os.environ['PATH']}")
    folder = tmp_path / "kv"
    folder.mkdir()
    with pytest.raises(KvprobeError, match=r"^fio failed .*: fio: no luck$"):
        run_sweep(str(folder), QUICK)
    assert list(folder.iterdir()) == []


def test_a_killed_sweep_leaves_no_file(tmp_path: Path) -> None:
    words = ["sweep", str(tmp_path), "--sizes", "64k", "--depths", "1", "--max-bytes", "16m"]
    sweeping = subprocess.Popen(
        [sys.executable, "-m", "kvprobe", *words, "--seconds-per-cell", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert sweeping.stderr is not None
    with sweeping, sweeping.stderr:
        assert any("measuring" in line for line in sweeping.stderr)
        os.kill(sweeping.pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_rates: list[fio.Job]
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert len(run_sweep(str(tmp_path), QUICK).cells) == 4
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- fio's words


def test_what_fio_says_is_found_behind_its_warnings() -> None:
    said = {"jobs": [{"error": 0, "read": {"io_bytes": 7_340_032, "runtime": 512}}]}
    assert fio.parse("fio: a note\n" + json.dumps(said) + "\n") == 7_340_032 / 0.512


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["jobs", "read", "io_bytes", "runtime", "error"]), inner
            )
        ),
    ).map(json.dumps)
)
def test_nonsense_from_fio_is_one_error(text: str) -> None:
    try:
        rate = fio.parse(text)
    except KvprobeError as error:
        assert "\n" not in error.message
    else:
        assert 0 < rate < math.inf


def test_buffered_threads_read_apart() -> None:
    job = fio.Job("/x", 64 * MIB, 3 * MIB, 4, False, "psync", 0.25, 1)
    words = fio.command(job)
    assert {"--numjobs=4", "--iodepth=1", "--runtime=250ms", "--direct=0"} <= set(words)
    assert {f"--size={15 * MIB}", f"--offset_increment={15 * MIB}"} <= set(words)
    assert "--time_based" not in words


# ---------------------------------------------------------------- the file


@pytest.fixture
def swept(tmp_path: Path, known_rates: list[fio.Job]) -> sweep.Sweep:
    return run_sweep(str(tmp_path), QUICK)


def test_the_verb(
    tmp_path: Path, known_rates: list[fio.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    words = [
        "sweep",
        str(tmp_path),
        "--sizes",
        "1m,64k",
        "--depths",
        "1,4",
        "--repeats",
        "2",
        "--max-bytes",
        "32m",
        "-o",
        str(out),
    ]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "4 cells x 2 repeats = 8 runs" in said.err and "about" in said.err
    assert "depth 4" in said.out and "1.00 MiB" in said.out
    cells = read_sweep(str(out))
    assert len(cells) == 4 and cells[0].size_bytes == 64 * KIB
    assert cli.main([*words[:-2], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["version"]) == ("kvprobe-sweep", 1)


def test_where_the_file_cannot_be_written_nothing_is_measured(
    tmp_path: Path, known_rates: list[fio.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", str(tmp_path), "-o", str(tmp_path / "no" / "s.json")]) == 2
    assert "cannot write" in capsys.readouterr().err and not known_rates


def test_a_file_comes_back_as_it_went(tmp_path: Path, swept: sweep.Sweep) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(document(swept)))
    assert read_sweep(str(path)) == swept.cells


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "no JSON"),
        ("[" * 100_000, "no JSON"),
        ([], "not a sweep"),
        ({"format": "else"}, "not a sweep"),
        ({"version": 2}, "version 2, known is 1"),
        ({"cells": []}, "no cells"),
        ({"cells": [3]}, "is no cell"),
    ],
)
def test_files_of_strangers(tmp_path: Path, swept: sweep.Sweep, change: object, words: str) -> None:
    path = tmp_path / "s.json"
    whole = json.dumps(document(swept))
    match change:
        case None:
            text = whole[:-40]
        case str():
            text = change
        case dict():
            text = json.dumps({**document(swept), **change})
        case _:
            text = json.dumps(change)
    path.write_text(text)
    with pytest.raises(KvprobeError, match=words) as raised:
        read_sweep(str(path))
    assert raised.value.exit_code == ExitCode.USAGE


@given(
    st.sampled_from(
        ["size_bytes", "depth", "n", "direct", "bytes_per_s", "low_bytes_per_s", "high_bytes_per_s"]
    ),
    st.none() | st.text(max_size=3) | st.floats() | st.booleans() | st.integers(max_value=0),
)
def test_a_damaged_cell_is_refused_or_sound(name: str, value: object) -> None:
    from tempfile import NamedTemporaryFile

    cell = {
        "size_bytes": 4096,
        "depth": 2,
        "direct": True,
        "bytes_per_s": 3.0,
        "low_bytes_per_s": 2.0,
        "high_bytes_per_s": 5.0,
        "n": 3,
    }
    found = {"format": "kvprobe-sweep", "version": 1, "cells": [{**cell, name: value}]}
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(found, file)
        file.flush()
        try:
            (read,) = read_sweep(file.name)
        except KvprobeError:
            return
    assert 0 < read.low_bytes_per_s <= read.bytes_per_s <= read.high_bytes_per_s < math.inf
    assert min(read.size_bytes, read.depth, read.n) > 0
    assert read.direct in (True, False)


def test_unreadable_and_huge(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError, match="cannot read"):
        read_sweep(str(tmp_path / "nothing"))
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(KvprobeError, match="too large"):
        read_sweep(str(huge))
