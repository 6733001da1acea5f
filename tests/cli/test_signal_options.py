"""``--engine`` and ``--signal`` as a shell sees them, with a process that looks like a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvprobe import cli, engines
from kvprobe.adapter import RunningEngine
from kvprobe.capture.reader import open_capture
from kvprobe.commands._listening import Listening, about_to_run, listen, running_engines
from kvprobe.model import EngineFacts
from kvprobe.signals import FeedBatch
from kvprobe.signals.combined import CombinedSignal
from kvprobe.sources.processes import processes

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/data/engines/vllm/fs-tier-debug.log"
SERVER = """
import re, sys, time
print("up", flush=True)
time.sleep(float(sys.argv[-2]))
now = time.strftime("%m-%d %H:%M:%S")
sys.stdout.write(re.sub("12-01 [0-9:]+", now, open(sys.argv[-1]).read()))
sys.stdout.flush()
time.sleep({rest})
"""
REQUESTS = 6
"""Requests of which the recorded log speaks."""


def tier(root: Path) -> str:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return json.dumps(connector)


def server_words(folder: Path, rest: float, wait: float) -> list[str]:
    """A command line of vLLM; it writes a recorded log and listens nowhere."""
    program = folder / "bin/vllm"
    program.parent.mkdir(exist_ok=True)
    program.write_text(SERVER.format(rest=rest))
    (folder / "kv").mkdir(exist_ok=True)
    options = ("--port", "1", "--kv-transfer-config", tier(folder / "kv"))
    words = [sys.executable, str(program), "serve", "some/model", *options]
    return [*words, "--x", str(wait), str(RECORDED)]


@contextmanager
def serving(folder: Path, wait: float) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / "vllm.log"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG"}
    with log.open("wb") as output:
        child = subprocess.Popen(server_words(folder, 60, wait), stdout=output, env=environment)
    try:
        until = time.monotonic() + 10
        while b"up" not in log.read_bytes():
            assert time.monotonic() < until
            time.sleep(0.02)
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def kvprobe(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvprobe", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def heads(text: str) -> list[str]:
    return [line.removeprefix("kvprobe: ") for line in text.splitlines()]


# ---------------------------------------------------------------- a server that runs


@pytest.mark.root
def test_a_capture_hears_the_server_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    with serving(tmp_path, 1.5) as server:
        done = kvprobe("capture", "-d", 3, "-o", out, "--root", tmp_path / "kv")
    assert done.returncode == 0, done.stderr
    said = heads(done.stderr)
    log = tmp_path / "vllm.log"
    assert said[0].startswith(f"vllm runs as process {server.pid}: ")
    assert said[0].endswith(f", KV cache in {tmp_path / 'kv'}")
    assert said[1] == f"listening to metrics:http://127.0.0.1:1/metrics, log:{log}"
    counted = [line for line in said if line.startswith(f"log:{log}: ")]
    assert len(counted) == 1 and not counted[0].endswith(": 0 messages understood")
    with open_capture(out) as capture:
        engine = capture.manifest.engine
        assert engine is not None and engine.name == "vllm" and engine.model == "some/model"
        assert engine.root == str(tmp_path / "kv")
        assert len(capture.frame("requests")["id"]) == REQUESTS
        (note,) = (n for n in capture.manifest.notes if "metrics:" in n)
        assert note.startswith("no page came from metrics:http://127.0.0.1:1/metrics")
        assert not [n for n in capture.manifest.notes if "log:" in n]


@pytest.mark.root
def test_a_command_is_an_engine_too(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    words = ("-o", out, "--", *server_words(tmp_path, 0.5, 1.0))
    done = kvprobe("capture", *words, VLLM_LOGGING_LEVEL="DEBUG")
    assert done.returncode == 0, done.stderr
    said = heads(done.stderr)
    assert said[0].startswith("vllm runs as process ") and str(tmp_path / "kv") in said[0]
    with open_capture(out) as capture:
        assert capture.manifest.engine is not None
        assert capture.manifest.engine.root == str(tmp_path / "kv")


@pytest.mark.root
def test_nobody_is_looked_for_where_that_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "a.kvcap"
    with serving(tmp_path, 60):
        done = kvprobe("capture", "-d", 0.3, "-o", out, "--engine", "none")
    assert done.returncode == 0, done.stderr
    assert "runs as process" not in done.stderr and "listening" not in done.stderr
    with open_capture(out) as capture:
        assert capture.manifest.engine is None and capture.manifest.signal_understood is None


@pytest.mark.root
def test_what_the_user_names_must_be_there(tmp_path: Path) -> None:
    for words in (
        ("--signal", f"log:{tmp_path}/no/such/log"),
        ("--signal", "otlp:0"),
        ("--signal", "telepathy:x"),
        ("--engine", "lmcache", "--signal", "kv-events:tcp://127.0.0.1:1"),
    ):
        done = kvprobe("capture", "-d", 1, "-o", tmp_path / "a.kvcap", *words)
        assert done.returncode == 2, done.stderr
        what, hint = done.stderr.splitlines()
        assert what.startswith("kvprobe: ") and hint.startswith("hint: ")
    assert not (tmp_path / "a.kvcap").exists()


@pytest.mark.root
def test_doctor_tells_of_the_server_in_json_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, 60) as server:
        assert cli.main(["doctor", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    (found,) = [each for each in document["engines"] if each["pid"] == server.pid]
    assert found["engine"] == "vllm" and found["roots"] == [str(tmp_path / "kv")]
    assert {"kind": "log", "target": str(tmp_path / "vllm.log")} in found["signals"]
    assert any("--otlp-traces-endpoint" in text for text in found["advice"])


@pytest.mark.root
def test_a_folder_of_a_container_has_its_name_here(tmp_path: Path) -> None:
    """What a container has under /inside is mounted here under another name."""
    store, inside = tmp_path / "store", tmp_path / "inside"
    (store / "kv").mkdir(parents=True)
    inside.mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    serve = [sys.executable, str(tmp_path / "bin/vllm"), "serve", "some/model"]
    serve += ["--kv-transfer-config", tier(inside / "kv")]
    mount = f'mount --bind {store} {inside} && exec "$@"'
    words: Sequence[str] = ("unshare", "--mount", "sh", "-c", mount, "sh", *serve)
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            mine = [p for p in processes() if p.pid == child.pid]
            (found,), problems = running_engines(mine)
        finally:
            child.kill()
    assert not problems
    assert found.roots == (str(store / "kv"),)
    assert found.facts is not None and found.facts.root == str(store / "kv")


# ---------------------------------------------------------------- words


class Silent:
    """A feed that hears so much."""

    last_word = False

    def __init__(self, name: str, batch: FeedBatch) -> None:
        self.name, self._batch = name, batch

    def poll(self, clock: object) -> FeedBatch:
        return FeedBatch()

    def close(self, clock: object) -> FeedBatch:
        return self._batch


def notes_of(**feeds: FeedBatch) -> list[str]:
    signal = CombinedSignal([])
    for name, batch in feeds.items():
        signal.add(Silent(name.replace("_", ":"), batch))
    signal.close()
    assert signal.close().understood == 0, "what is closed says nothing more"
    return list(Listening(None, signal).notes())


def test_each_place_says_what_it_did_not_hear() -> None:
    said = notes_of(
        log_a=FeedBatch(understood=7),
        log_b=FeedBatch(ignored=3),
        otlp_c=FeedBatch(notes=("nobody sent to otlp:c",)),
        files_d=FeedBatch(understood=1009, ignored=5, lost=11),
    )
    assert said == [
        "nobody sent to otlp:c",
        "nothing of a request was heard from log:b: is it the engine's log, at the level that "
        "`kvprobe doctor` names?",
        "5 messages of files:d were not understood, 1,009 were",
        "11 messages of files:d were lost",
    ]


def test_two_servers_have_in_common_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def server(pid: int, model: str, root: str, tokens: int) -> RunningEngine:
        facts = EngineFacts("vllm", model=model, unit_tokens=tokens, root=root, prefetch=False)
        return RunningEngine("vllm", pid, "x", (root,), facts=facts)

    pair = (server(7, "m", "/a", 16), server(11, "m", "/b", 16))
    monkeypatch.setattr(engines, "running", lambda table: (pair, ("vllm: options are odd",)))
    found = listen("auto", [], None, [])
    assert found.facts == EngineFacts("vllm", model="m", unit_tokens=16, prefetch=False)
    assert "vllm: options are odd" in found.told
    assert found.told[-1].startswith("nothing is heard of requests")


def test_a_command_is_looked_at_before_it_runs(tmp_path: Path) -> None:
    process = about_to_run(17, ["/x/bin/vllm", "serve", "m"])
    assert (process.pid, process.parent, process.name) == (17, os.getpid(), "vllm")
    assert process.arguments == ("/x/bin/vllm", "serve", "m")
    assert process.environment["PATH"] == os.environ["PATH"]


def test_every_engine_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engines", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)["engines"]}
    assert list(listed) == list(engines.engines())
    for name, engine in engines.engines().items():
        assert listed[name]["summary"] == engine.summary
        assert ("log" in listed[name]["signals"]) == bool(engine.log_lines)
        assert ("otlp" in listed[name]["signals"]) == (engine.read_span is not None)
    assert listed["jsonl"]["signals"] == ["events"]
    assert cli.main(["engines"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name:8}  " in text for name in listed)
    assert len(text.splitlines()) == len(listed)  # into a pipe: a line each
