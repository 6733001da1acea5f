"""Engines found in the process table: real processes with the command lines of engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprobe import engines
from kvprobe.adapter import Process
from kvprobe.commands import _diagnosis, _listening
from kvprobe.commands._listening import AUTO, OWN, listen
from kvprobe.errors import KvprobeError
from kvprobe.sources.processes import processes

SLEEPER = "import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n"
PARENT = (
    "import os, sys, time\nif not os.fork(): time.sleep(60)\nprint('up', flush=True)\n"
    "time.sleep(60)\n"
)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``python BIN/vllm serve ..``, as the real command is; its output in a file."""
    started: list[subprocess.Popen[str]] = []

    def run(*options: str, script: str = SLEEPER, before: tuple[str, ...] = (), **env: str):  # type: ignore[no-untyped-def]
        program = tmp_path / "bin" / "vllm"
        program.parent.mkdir(exist_ok=True)
        program.write_text(script)
        log = tmp_path / "vllm.log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [*before, sys.executable, str(program), "serve", "some/model", *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=tmp_path,
                text=True,
                process_group=0,
            )
        started.append(child)
        for _ in range(500):
            if "up" in log.read_text():
                return child
            time.sleep(0.01)
        raise AssertionError("it did not start")

    yield run
    for child in started:
        os.killpg(child.pid, 9)
        child.wait()


def tier(root: Path) -> str:
    return json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            },
        }
    )


def test_a_process_is_as_procfs_has_it(start: Start, tmp_path: Path) -> None:
    child = start("--port", "18123", KVPROBE_TEST="1009")
    (mine,) = [p for p in processes() if p.pid == child.pid]
    assert mine.arguments[-4:] == ("serve", "some/model", "--port", "18123")
    assert (mine.parent, mine.folder, mine.seen_from) == (os.getpid(), str(tmp_path), "")
    assert mine.environment["KVPROBE_TEST"] == "1009" and len(mine.environment) > 1
    assert mine.log == str(tmp_path / "vllm.log")


def test_everything_that_runs_can_be_looked_at() -> None:
    table = {process.pid: process for process in processes()}
    assert os.getpid() in table and all(p.arguments[0] for p in table.values())
    assert not {0, 2} & set(table), "kernel threads have no command line"


def test_odd_process_tables(tmp_path: Path) -> None:
    whole = tmp_path / "17"
    whole.mkdir()
    (whole / "cmdline").write_bytes(b"a\0\xff\0")
    (whole / "stat").write_bytes(b"17 (a) (b) S 1 2 3\n")
    for name, stat in {"19": "", "23": "23 (gone) Z 1", "29": "29"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_bytes(b"x\0")
        (tmp_path / name / "stat").write_text(stat)
    (tmp_path / "31").mkdir()
    (only,) = processes(tmp_path)
    assert (only.pid, only.parent, only.name) == (17, 1, "a) (b")
    assert only.arguments == ("a", "\udcff") and dict(only.environment) == {}
    assert only.log is None and only.folder is None


def test_one_server_is_found_with_its_folder_and_signals(start: Start, tmp_path: Path) -> None:
    child = start(
        "--port=18123",
        "--kv-transfer-config",
        tier(tmp_path / "kv"),
        "--otlp-traces-endpoint",
        "http://127.0.0.1:18317",
        script=PARENT,  # its worker has the same command line
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    found, problems = engines.running(processes())
    mine = [each for each in found if each.pid == child.pid]
    assert [each.engine for each in mine] == ["vllm"] and not problems
    assert not [each for each in found if str(tmp_path / "kv") in each.roots and each not in mine]
    assert mine[0].roots == (str(tmp_path / "kv"),)
    assert {str(place) for place in mine[0].signals} == {
        "metrics:http://127.0.0.1:18123/metrics",
        "otlp:18317",
        f"log:{tmp_path / 'vllm.log'}",
    }


@pytest.mark.root
def test_paths_of_a_container_can_be_opened(start: Start, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    mount = f'mount -t tmpfs none {own} && mkdir {own}/kv && exec "$@"'
    child = start(
        "--kv-transfer-config", tier(own / "kv"),
        before=("unshare", "--mount", "sh", "-c", mount, "sh"),
        VLLM_LOGGING_LEVEL="DEBUG",
    )  # fmt: skip
    (mine,) = [e for e in engines.running(processes())[0] if e.pid == child.pid]
    assert mine.roots == (f"/proc/{child.pid}/root{own}/kv",)
    assert Path(mine.roots[0]).is_dir() and not (own / "kv").exists()
    (log,) = [place.target for place in mine.signals if place.kind == "log"]
    assert Path(log).read_text().startswith("up")


def test_options_that_make_no_sense_end_nothing() -> None:
    odd = [
        Process(7, 1, "vllm", ("/x/bin/vllm", "serve", "m", *words), {})
        for words in (
            ("--kv-transfer-config",),
            ("--kv-transfer-config", "{"),
            ("--kv-transfer-config", '{"kv_connector": 7, "kv_connector_extra_config": [1]}'),
            ("--port", "x", "--tensor-parallel-size", "-1"),
            ("--otlp-traces-endpoint", "http://[::1"),
            ("\udcff" * 9,),
        )
    ]
    for process in odd:
        found, problems = engines.running([process])
        assert len(found) + len(problems) >= 1


# ---------------------------------------------------------------- listening


@pytest.fixture
def server(start: Start, tmp_path: Path) -> subprocess.Popen[str]:
    return start(
        "--port=18123", "--kv-transfer-config", tier(tmp_path / "kv"),
        "--otlp-traces-endpoint", "http://127.0.0.1:18317", VLLM_LOGGING_LEVEL="DEBUG",
    )  # fmt: skip


def heard(listening: _listening.Listening) -> set[str]:
    assert listening.signal is not None
    names = set(listening.signal.understood)
    listening.signal.close()
    return {name.partition(":")[0] for name in names}


def test_auto_listens_to_what_runs(server: subprocess.Popen[str], tmp_path: Path) -> None:
    found = listen(AUTO, [], str(tmp_path / "kv"), [server.pid])
    assert heard(found) == {"metrics", "otlp", "log"}
    assert found.engine_name is None and found.facts is not None
    assert (found.facts.name, found.facts.model) == ("vllm", "some/model")
    assert any(f"vllm runs as process {server.pid}" in line for line in found.told)


def test_the_users_word_goes_before(server: subprocess.Popen[str], tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.touch()
    found = listen(AUTO, [str(other)], None, [server.pid])
    assert found.signal is not None
    assert f"log:{other}" in found.signal.understood
    assert f"log:{tmp_path / 'vllm.log'}" not in found.signal.understood
    assert heard(found) == {"metrics", "otlp", "log"}


def test_only_engines_that_are_traced(server: subprocess.Popen[str], tmp_path: Path) -> None:
    assert listen(AUTO, [], str(tmp_path / "elsewhere"), [server.pid]).signal is None
    with subprocess.Popen(["sleep", "60"]) as other:
        assert listen(AUTO, [], None, [other.pid]).signal is None
        other.kill()
    assert heard(listen(AUTO, [], None, [server.pid])) == {"metrics", "otlp", "log"}
    assert listen(AUTO, [], None, [], detect=False).signal is None
    assert listen("lmcache", [], str(tmp_path / "kv"), [server.pid]).signal is None


def test_a_port_that_somebody_has_is_told(server: subprocess.Popen[str], tmp_path: Path) -> None:
    first = listen(AUTO, [], None, [server.pid])
    second = listen(AUTO, [], None, [server.pid])
    assert any(line.startswith("not heard: otlp:18317: ") for line in second.told)
    assert heard(second) == {"metrics", "log"}
    with pytest.raises(KvprobeError, match="18317"):
        listen("vllm", ["otlp:18317"], None, [], detect=False)
    assert heard(first) == {"metrics", "otlp", "log"}


def test_own_events_are_not_mixed_with_others(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    found = listen(AUTO, [str(tmp_path / "requests.jsonl")], None, [server.pid])
    assert found.engine_name == OWN and heard(found) == set()


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", None, "events"),
        ("a.jsonl", '{"event":"engine"}', "events"),
        ("events", None, "events"),
        ("a.log", None, "log"),
        ("a.jsonl", "INFO 12-01 17:20:23", "log"),
        ("server", "(EngineCore pid=1) DEBUG", "log"),
    ],
)
def test_what_a_bare_file_is(tmp_path: Path, name: str, content: str | None, kind: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    found = listen(AUTO, [str(path)], None, [], detect=False)
    assert heard(found) == ({"log"} if kind == "log" else set())
    assert found.engine_name == (OWN if kind == "events" else None)


def test_words_that_are_no_place(tmp_path: Path) -> None:
    for text in ("nonsense:x", "log:", "/no/such/folder/x.log", "metrics:ftp://x"):
        with pytest.raises(KvprobeError):
            listen(AUTO, [text], None, [], detect=False)
    with pytest.raises(KvprobeError, match="no engine named 'nosuch'"):
        listen("nosuch", [], None, [])


def test_doctor_says_how_an_engine_is_heard(
    server: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = [process for process in processes() if process.pid == server.pid]
    monkeypatch.setattr(_diagnosis, "processes", lambda: iter(only))
    said = [f"{f.name} {f.why} {f.effect} {f.fix}" for f in _diagnosis.engine_features(None)]
    assert said[0].startswith(f"vllm process {server.pid}: ")
    assert f"KV cache in {tmp_path / 'kv'}" in said[1]
    assert "log:" in said[2] and "otlp:18317" in said[2]
    assert len(said) == 3, "nothing is left to add"
