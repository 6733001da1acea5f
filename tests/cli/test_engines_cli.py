"""``kvprobe engines``: what each adapter declares, no more and no less."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvprobe import cli, engines, registry
from kvprobe.adapter import Engine, JsonFiles, LogLine, Metrics, RunningEngine
from kvprobe.model import EngineSetting

SCRIPT = """
import json, sys
from kvprobe.cli import main
main(["engines", *sys.argv[1:]])
print("\\n" + json.dumps(sorted(sys.modules)))
"""
HEAVY = {
    "google.protobuf", "grpc", "msgspec", "opentelemetry", "pandas", "prometheus_client",
    "psutil", "pyarrow", "rich", "scipy", "textual", "zmq",
}  # fmt: skip
NOTHING = re.compile("x")


def engine(name: str, **said: Any) -> Engine:
    return Engine(
        name,
        f"files of {name}",
        lambda path: None,
        lambda knob, value, facts: EngineSetting(None, None, "none"),
        **said,
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``kvprobe engines`` know these engines and no others."""

    def known(*made: Engine) -> None:
        named: Mapping[str, Engine] = {each.name: each for each in made}
        monkeypatch.setattr(engines, "engines", lambda: named)

    return known


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert cli.main(["engines", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"schema_version", "engines"}
    assert document["schema_version"] == 1
    found: list[dict[str, Any]] = document["engines"]
    return found


def test_every_file_of_the_folder_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(engines.__file__).parent
    stems = sorted(path.stem for path in folder.glob("[a-z]*.py"))
    assert [each["name"] for each in listed(capsys)] == stems
    assert cli.main(["engines"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == stems
    for name, line in zip(stems, out.splitlines(), strict=True):
        assert registry.load_one("kvprobe.engines", name, "ENGINE", Engine).summary in line


@pytest.mark.parametrize(
    ("said", "signals"),
    [
        ({}, []),
        ({"log_lines": (LogLine("a", "x", NOTHING, lambda *_: None),)}, ["log", "journal"]),
        ({"json_files": (JsonFiles(NOTHING, lambda *_: []),)}, ["files"]),
        ({"metrics": Metrics(NOTHING)}, ["metrics"]),
        ({"read_span": lambda *_: None}, ["otlp"]),
        ({"publishes_kv_events": True}, ["kv-events"]),
        ({"describes_files": False}, ["events"]),
    ],
    ids=lambda value: "-".join(value) or "nothing",
)
def test_a_signal_is_listed_where_its_field_is_set(
    install: Any, capsys: pytest.CaptureFixture[str], said: dict[str, Any], signals: list[str]
) -> None:
    install(engine("abc", **said))
    assert listed(capsys) == [
        {
            "name": "abc",
            "summary": "files of abc",
            "has_files": said.get("describes_files", True),
            "can_be_detected": False,
            "signals": signals,
        }
    ]
    assert cli.main(["engines"]) == 0
    heard = f"heard by {', '.join(signals)}" if signals else "no signals of its own"
    assert capsys.readouterr().out == f"abc  files of abc; {heard}; not found by itself\n"


def test_whether_it_can_be_detected(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def detect(process: object) -> RunningEngine | None:
        raise AssertionError("listing looks at no process")

    install(engine("seen", detect=detect), engine("un"))
    assert [each["can_be_detected"] for each in listed(capsys)] == [True, False]
    assert cli.main(["engines"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "seen  files of seen; no signals of its own; found when it runs"
    assert second == "un    files of un; no signals of its own; not found by itself"


@pytest.mark.parametrize("columns", [47, 80])
def test_a_terminal_is_filled_and_never_exceeded(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["engines"]) == 0
    assert "\x1b[1mvllm\x1b[0m" in terminal.getvalue()
    lines = re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()
    assert columns - 12 < max(map(len, lines)) <= columns
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == sorted(engines.engines())
    indent = max(map(len, names)) + 2
    for line in lines:
        assert line[indent - 1] == " " and line[indent] != " "


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_listing_loads_no_library_of_a_signal(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "kvprobe.commands.engines" in loaded
    assert not loaded & HEAVY
