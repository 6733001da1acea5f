"""``kvprobe report`` as a shell sees it: streams, exit codes, files that are not what they seem."""

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvprobe import cli, document
from tests.reports.recorded import REQUESTS, SIZE_BYTES, write_capture


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole capture with critical findings."""
    return write_capture(tmp_path_factory.mktemp("report") / "node.kvcap")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that was cut off and lost rows."""
    path = tmp_path_factory.mktemp("report") / "cut.kvcap"
    return write_capture(path, complete=False, lost=13)


Captured = pytest.CaptureFixture[str]
_built: dict[tuple[Any, ...], dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correlate each capture once for all tests of this file; that takes most of their time."""
    build = document.build

    def remembered(capture: Any, sweeps: Any = ()) -> dict[str, Any]:
        key = (capture.path, capture.path.stat().st_mtime_ns, tuple(sweeps))
        if key not in _built:
            _built[key] = build(capture, sweeps)
        return copy.deepcopy(_built[key])

    monkeypatch.setattr(document, "build", remembered)


def test_text_goes_to_stdout(node: Path, capsys: Captured) -> None:
    assert cli.main(["report", str(node)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("capture   ")
    assert "paid off for" in out
    assert "serial_restore" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out


@pytest.mark.parametrize("words", [["--format", "json"], ["--json"]])
def test_json_is_one_document(node: Path, capsys: Captured, words: list[str]) -> None:
    assert cli.main(["report", str(node), *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert len(found["requests"]) == REQUESTS


def test_a_cut_capture_is_reported_and_exits_4(cut: Path, capsys: Captured) -> None:
    assert cli.main(["report", str(cut)]) == 4
    out = capsys.readouterr().out
    assert out.startswith("INCOMPLETE")
    assert out.splitlines()[1].startswith("LOSSES")
    assert "block: 13 lost" in out
    assert "paid off for" in out


@pytest.mark.parametrize("level", ["info", "warning", "critical"])
def test_fail_on(node: Path, cut: Path, capsys: Captured, level: str) -> None:
    assert cli.main(["report", str(node), "--fail-on", level, "--summary"]) == 1
    assert cli.main(["report", str(cut), "--fail-on", level, "--json"]) == 1
    assert capsys.readouterr().err == ""


def test_fail_on_a_severity_that_was_not_reached(
    node: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = document.build

    def milder(*words: Any, **options: Any) -> dict[str, Any]:
        found = whole(*words, **options)
        for finding in found["findings"]:
            finding["severity"] = "warning"
        return found

    monkeypatch.setattr(document, "build", milder)
    assert cli.main(["report", str(node), "--fail-on", "critical"]) == 0
    assert cli.main(["report", str(node), "--fail-on", "warning"]) == 1
    capsys.readouterr()


def test_output_goes_to_a_file(node: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "report.txt"
    assert cli.main(["report", str(node), "-o", str(path), "--width", "80"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err
    text = path.read_text(encoding="utf-8")
    assert "Where restore time went" in text
    assert max(map(len, text.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == [path]


def test_output_never_replaces_the_capture(node: Path, capsys: Captured) -> None:
    before = node.read_bytes()
    assert cli.main(["report", str(node), "-o", str(node)]) == 2
    assert node.read_bytes() == before
    assert "is the capture itself" in capsys.readouterr().err


def test_output_where_none_can_be(node: Path, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["report", str(node), "-o", str(tmp_path / "no" / "report.txt")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("wanted", ["0", "3", "all", "r17", "id:17"])
def test_requests(node: Path, capsys: Captured, wanted: str) -> None:
    code = cli.main(["report", str(node), "--requests", wanted])
    out, err = capsys.readouterr()
    if wanted == "id:17":  # part of r17, r117 and r170 to r179
        assert code == 2
        assert "12 requests have '17' in their id" in err
        return
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith(" r") and line[2].isdigit()]
    assert len(lines) == {"0": 0, "3": 3, "all": REQUESTS, "r17": 0}[wanted]
    assert ("Request  r17\n" in out) == (wanted == "r17")


def sweep_file(path: Path, *, depth: int = 8) -> Path:
    """A sweep of two depths, as ``kvprobe sweep`` writes it."""
    cells = [
        {
            "size_bytes": 65_536,
            "depth": deep,
            "direct": True,
            "bytes_per_s": 145e6 * deep,
            "low_bytes_per_s": 140e6 * deep,
            "high_bytes_per_s": 151e6 * deep,
            "n": 5,
        }
        for deep in (1, depth)
    ]
    found = {"format": "kvprobe-sweep", "version": 1, "cells": cells}
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def test_sweeps_reach_the_proposals(node: Path, tmp_path: Path, capsys: Captured) -> None:
    proposed = []
    for more in ([], ["--sweep", str(sweep_file(tmp_path / "sweep.json"))]):
        assert cli.main(["report", str(node), "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        proposed.append([(p["knob"], p["proposed"], p["needs"]) for p in found["proposals"]])
    assert proposed[0] != proposed[1]


@pytest.mark.parametrize("size_bytes, code", [(None, 0), (SIZE_BYTES, 0), (7 << 30, 2)])
def test_a_sweep_of_other_storage_is_refused(
    node: Path, tmp_path: Path, capsys: Captured, size_bytes: int | None, code: int
) -> None:
    path = sweep_file(tmp_path / "sweep.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    found["device"] = {
        "name": "renamed",
        "transport": "loop",
        "size_bytes": size_bytes,
    }
    path.write_text(json.dumps(found), encoding="utf-8")
    assert cli.main(["report", str(node), "--sweep", str(path)]) == code
    assert ("measured renamed" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "kvprobe-sweep", "version": 1}'])
def test_a_sweep_that_is_none(node: Path, tmp_path: Path, capsys: Captured, content: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(content, encoding="utf-8")
    assert cli.main(["report", str(node), "--sweep", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def damaged(whole: bytes, how: str) -> bytes:
    """The bytes of a capture after something happened to them."""
    if how == "empty":
        return b""
    if how == "foreign":
        return b"PK\x03\x04" + b"not a capture" * 97
    if how == "truncated":
        return whole[: len(whole) * 2 // 3]
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 0x20]) + whole[middle + 1 :]


@pytest.mark.parametrize("how", ["empty", "foreign", "truncated", "flipped"])
def test_damaged_files_end_in_one_line(
    node: Path, tmp_path: Path, capsys: Captured, how: str
) -> None:
    path = tmp_path / "bad.kvcap"
    path.write_bytes(damaged(node.read_bytes(), how))
    assert cli.main(["report", str(path)]) in (2, 4)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "defect" not in err


@pytest.mark.parametrize(
    "words", [[], ["f", "--width", "79"], ["f", "--width", "x"], ["f", "--format", "csv"],
              ["f", "--fail-on", "some"], ["no-such-file"], ["f", "--json", "--summary"],
              ["f", "--json", "--requests", "3"], ["f", "--json", "--width", "99"],
              ["f", "--summary", "--requests", "all"]],
)  # fmt: skip
def test_usage(words: list[str], capsys: Captured) -> None:
    assert cli.main(["report", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_terminal_without_utf8_gets_ascii(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main(["report", str(node), "--summary"]) == 0
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "####" in text
    assert "?" not in text


def test_no_colour_and_colour(
    node: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["report", str(node), "--summary"]) == 0
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["report", str(node), "--summary"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_goes_away(node: Path) -> None:
    command = f"{sys.executable} -m kvprobe report {node} --requests all | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 141)
    assert done.stderr == ""
    assert done.stdout.startswith("capture")
