"""``kvprobe workload`` as a shell sees it: output, exit codes, Ctrl-C, full and odd disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvprobe.cli import main
from kvprobe.workload.scratch import scratch_filesystem

TRACE = str(Path(__file__).parents[1] / "data" / "mooncake_head.jsonl")
KVPROBE = [sys.executable, "-m", "kvprobe", "workload"]
QUICK = ["--model", "tiny", "--prefill-cost", "0.5,1,0", "--prompt-tokens", "500"]


def kvprobe(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*KVPROBE, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    done = kvprobe(
        "run", "--root", str(tmp_path), *QUICK, "--trace", TRACE, "--requests", "31",
        "--max-prompt-tokens", "1500", "--unit-tokens", "128", "--concurrency", "3", "--buffered",
        "--json",
    )  # fmt: skip
    summary = json.loads(done.stdout)
    rows = [json.loads(line) for line in Path(TRACE).read_text().splitlines()[:31]]
    assert summary["requests"] == 31
    assert summary["tokens"]["prompt"] == sum(min(1500, row["input_length"]) for row in rows)
    distinct = {
        (row["hash_ids"][(end - 1) // 512], end)
        for row in rows
        for end in range(128, min(1500, row["input_length"]) + 1, 128)
    }
    assert summary["chunks"]["stored"] == len(distinct) == len(list(tmp_path.rglob("*.bin")))
    assert summary["unit_bytes"] == 128 * 2048
    assert done.stderr == "kvprobe: requests: 31\n"


def test_trace_times_are_scaled(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    kvprobe(
        "run", "--root", str(tmp_path), *QUICK, "--trace", TRACE, "--requests", "13",
        "--max-prompt-tokens", "200", "--time-scale", "0.02", "--events", str(events), "--clean",
    )  # fmt: skip
    arrivals = [json.loads(line) for line in events.read_text().splitlines()]
    times = [row["t_ns"] for row in arrivals if row["event"] == "arrival"]
    stamps = [json.loads(line)["timestamp"] for line in Path(TRACE).read_text().splitlines()[:13]]
    for at, stamp in zip(times, stamps, strict=True):
        assert abs((at - times[0]) - stamp * 20_000) < 100_000_000


def test_text_and_clean(tmp_path: Path) -> None:
    done = kvprobe("run", "--root", str(tmp_path), *QUICK, "--requests", "7", "--clean")
    assert done.stdout.startswith("7 requests in ")
    assert "prefill modelled" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_finds_what_the_first_stored(tmp_path: Path) -> None:
    words = ["run", "--root", str(tmp_path), *QUICK, "--requests", "7", "--json"]
    warm = json.loads(kvprobe(*words, "--warm", "all", "--warm-only").stdout)
    assert (warm["requests"], warm["ttft_ms"]["p50"]) == (0, None)
    summary = json.loads(kvprobe(*words).stdout)
    assert summary["operations"]["write"] == 0
    assert summary["operations"]["read"] == summary["tokens"]["restored"] // 16 > 0
    other = json.loads(kvprobe(*words, "--layers", "3").stdout)
    assert other["unit_bytes"] == 16 * 1536 and other["base"] != summary["base"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model", "gpt-2"], 2, "no model preset 'gpt-2'"),
        (["--model", "deepseek-v3"], 2, "1124352 B is not a multiple of 4096"),
        (["--root", "/nonexistent"], 2, "no folder /nonexistent"),
        (["--policy", "maybe"], 2, "no policy 'maybe'"),
        (["--policy", "threshold"], 2, "no policy 'threshold'"),
        (["--concurrency", "3", "--rate", "5"], 2, "closed loop"),
        (["--time-scale", "2"], 2, "--time-scale needs --trace"),
        (["--trace", "/nonexistent"], 2, "cannot read trace"),
        (["--trace", "/dev/null"], 2, "no requests in /dev/null"),
        (["--unit-tokens", "0"], 2, "positive"),
        (["--requests", "x"], 2, "whole number"),
        (["--capacity-bytes", "5X"], 2, "whole number"),
        (["--shared-share", "1.5"], 2, "0..1"),
        (["--prefill-cost", "1,2"], 2, "not a prefill cost"),
        (["--prefill-cost", "nan,1,1"], 2, "not a prefill cost"),
        (["--events", "/nonexistent/e"], 2, "cannot write /nonexistent/e"),
        (["--layout", "floppy"], 2, "invalid choice"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    base = ["workload", "run", "--root", str(tmp_path), "--requests", "3"]
    assert main([*base, *words]) == code
    done = capsys.readouterr()
    message, hint = done.err.strip().splitlines()
    assert says in message and message.startswith("kvprobe: ")
    assert hint.startswith("hint: ")
    assert done.out == ""
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.root
def test_direct_io_where_it_is_refused(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "ramfs", "ramfs", str(tmp_path)], check=True)
    try:
        words = ["run", "--root", str(tmp_path), *QUICK, "--requests", "3"]
        done = kvprobe(*words, code=3)
        assert "direct I/O refused" in done.stderr and "--buffered" in done.stderr
        assert list(tmp_path.iterdir()) == []
        kvprobe(*words, "--buffered")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.root
def test_a_full_disk_stops_with_one_line_and_whole_files(tmp_path: Path) -> None:
    with scratch_filesystem(32 << 20, str(tmp_path)) as made:
        events, truth = tmp_path / "events", tmp_path / "truth"
        done = kvprobe(
            "run", "--root", made.root, *QUICK, "--requests", "100", "--prompt-tokens", "3000",
            "--shared-share", "0", "--events", str(events), "--truth", str(truth), code=4,
        )  # fmt: skip
        assert "No space left on device" in done.stderr and "--capacity-bytes" in done.stderr
        assert not list(Path(made.root).rglob("*.tmp"))
        rows = [json.loads(line) for line in truth.read_text().splitlines()]
        assert rows[-1]["end_ns"] and any(row.get("result") == -28 for row in rows)
        done = kvprobe(
            "run", "--root", made.root, *QUICK, "--requests", "100", "--prompt-tokens", "3000",
            "--shared-share", "0", "--warm", "all", code=2,
        )  # fmt: skip
        assert "B are free" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("clean", [False, True])
def test_interrupted(tmp_path: Path, number: signal.Signals, clean: bool) -> None:
    root, events, truth = tmp_path / "kv", tmp_path / "events", tmp_path / "truth"
    root.mkdir()
    child = subprocess.Popen(
        [*KVPROBE, "run", "--root", str(root), "--model", "tiny", "--requests", "50000",
         "--prompt-tokens", "300", "--prefill-cost", "5,0,0", "--concurrency", "4",
         "--events", str(events), "--truth", str(truth), *(["--clean"] if clean else [])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    give_up = time.monotonic() + 20
    while not (truth.exists() and truth.read_text().count('"read"') > 50):
        assert time.monotonic() < give_up and child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert out == "" and err.endswith("kvprobe: interrupted\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in truth.read_text().splitlines()]
    assert all(json.loads(line) for line in events.read_text().splitlines())
    files = list(root.rglob("*.bin"))
    if clean:
        assert list(root.iterdir()) == []
    else:
        assert len(files) == sum(row["kind"] == "rename" for row in rows)
        assert not list(root.rglob("*.tmp"))


def test_analyse(tmp_path: Path) -> None:
    done = kvprobe("analyse", TRACE, "--unit-tokens", "512,1024", "--json")
    fine, coarse = json.loads(done.stdout)["units"]
    assert (fine["unit_tokens"], coarse["unit_tokens"]) == (512, 1024)
    assert fine["requests"] == 197
    assert fine["reusable_tokens"] >= coarse["reusable_tokens"]
    text = kvprobe("analyse", TRACE, "--requests", "13").stdout.splitlines()
    assert len(text) == 6
    kvprobe("analyse", "/dev/null", code=2)
    kvprobe("analyse", TRACE, "--unit-tokens", "0", code=2)


def test_help_names_each_option_group() -> None:
    text = kvprobe("run", "--help").stdout
    for word in ("storage:", "model (", "requests (", "engine:", "output:", "--reads-in-flight"):
        assert word in text
    assert os.path.basename(sys.executable) not in text
