"""``kvprobe doctor`` and ``kvprobe probes``: verdict, words, shape, for root and for nobody."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TextIO

import pytest

from kvprobe import content
from kvprobe.bpf import features, machine, readiness, tracefs
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.features import Feature, State
from kvprobe.cli import main
from kvprobe.commands import _diagnosis, _terminal
from kvprobe.commands._doctor_text import lines
from kvprobe.commands._terminal import Style
from kvprobe.model import DeviceFacts
from kvprobe.sources import devices, nvme
from kvprobe.sources.devices import PathStorage
from tests.knobs.test_knobs import loop_mount
from tests.knobs.trees import plant

GROUPS = ["kernel", "loaders", "events", "storage", "engine", "tools", "GPU", "GPUDirect Storage"]


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    """Run kvprobe as another user who has no rights, in a process that can read this tree."""
    script = (
        "import os, sys\n"
        "from kvprobe.cli import main\n"
        "from kvprobe import engines; engines.engines()\n"  # while still readable
        "from kvprobe.commands import _diagnosis, doctor, probes\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60
    )


@pytest.mark.root
def test_root_can_capture_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--path", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings[: len(GROUPS)] == GROUPS
    assert "A capture here shows block requests" in " ".join(headings[len(GROUPS) :])
    assert "\x1b" not in text, "no colour into a pipe"


@pytest.mark.root
def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["capture_possible"] is True
    assert "block requests" in document["shows"]
    assert {feature["group"] for feature in document["features"]} == set(GROUPS)
    assert {feature["state"] for feature in document["features"]} <= {*State}


@pytest.mark.root
def test_nobody_is_told_why_not() -> None:
    done = as_nobody("doctor")
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert "user 65534, not root" in done.stdout
    assert done.stdout.count("fix: sudo") == 1, "one cause is one complaint"
    fix = next(
        line for line in as_nobody("doctor", "--path", "/").stdout.splitlines() if "sudo" in line
    )
    assert fix.endswith("kvprobe doctor --path /"), "the same question"
    assert "No capture is possible here because of rights" in done.stdout
    document = json.loads(as_nobody("doctor", "--json").stdout)
    assert document["capture_possible"] is False and document["shows"] == []


@pytest.mark.root
def test_nobody_can_list_probes() -> None:
    done = as_nobody("probes", "--json")
    assert done.returncode == 0, done.stderr
    assert [probe["name"] for probe in json.loads(done.stdout)["probes"]]


def test_a_path_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--path", "/nonexistent/kv"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvprobe: cannot look at /nonexistent/kv")


def test_no_loader_and_no_event_stop_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_core", lambda states: features.absent("a", "b", "c"))
    monkeypatch.setattr(readiness, "_bcc", lambda: features.absent("d", "e", "f"))
    monkeypatch.setattr(Btf, "tracepoint_args", lambda self, name: None)
    monkeypatch.setattr(tracefs, "tracepoint_id", lambda category, name: None)
    found = _diagnosis.diagnose(None)
    assert not found.capture_possible
    stopping = {feature.name for feature in found.features if feature.stops_capture}
    assert {"core", "bcc", "block"} <= stopping


def test_one_loader_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_core", lambda states: features.absent("a", "b", "c"))
    monkeypatch.setattr(readiness, "_bcc", lambda: features.ok("d"))
    assert not any(f.stops_capture for f in readiness.loader_features(()))


def test_broken_probes_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes/broken.toml").write_text("nonsense = 1\n")
    (tmp_path / "probes/broken.bpf.c").write_text("")
    monkeypatch.setenv(content.ENVIRONMENT, str(tmp_path))
    assert main(["doctor", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    (probes,) = [f for f in document["features"] if f["group"] == "events"]
    assert probes["state"] == "absent" and "broken.toml" in probes["why"]


# ---------------------------------------------------------------- engines and storage


def test_files_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnosis, "processes", lambda: iter(()))
    chunks = tmp_path / "model_0123456789ab_r0" / "abc" / "de_g0"
    chunks.mkdir(parents=True)
    for tail in range(7):
        (chunks / f"abcde{tail:011x}.bin").touch()
    (tmp_path / "README").touch()
    looked_at, found = _diagnosis.recognise_files(str(tmp_path))
    assert (looked_at, found) == (8, {"vllm": 7})
    assert "7 of 8 files" in _diagnosis.engine_features(str(tmp_path))[0].why


@pytest.mark.root
def test_a_device_node_is_that_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_mount(tmp_path) as (name, point):
        for verb in ("doctor", "knobs"):
            assert main([verb, "--path", f"/dev/{name}", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            if verb == "doctor":
                named = {f["name"]: f for f in found["features"] if f["group"] == "storage"}
                assert "file system" not in named and "device" not in named
                assert str(point) in named[name]["why"]
                assert (found["chain"]["kind"], found["chain"]["name"]) == ("loop", name)
                assert not any("below" in f["why"] for f in found["features"]), "no folder"
            else:
                subjects = {each["subject"] for each in found["knobs"]}
                assert {name, str(point)} <= subjects
        assert main(["capture", "-d", "1", "--root", f"/dev/{name}"]) == 2
        assert "hint: --device names a disk" in capsys.readouterr().err


@pytest.mark.parametrize("recorded", ["6.1-tcp", "6.12-pci"])
def test_a_multipath_disk_has_no_queue_of_its_own(recorded: str, tmp_path: Path) -> None:
    tree = plant(recorded, tmp_path)
    facts = devices.facts_of("nvme0n1", tree.sysfs, (), tree.diskstats)
    assert facts is not None and facts.nr_requests
    text = _diagnosis.describe(facts, tree.sysfs)
    assert (f"scheduler none, nr_requests {facts.nr_requests}" in text) == ("pci" in recorded)
    assert "largest request" in text


def test_a_path_in_memory_has_no_device() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no /dev/shm")
    found = {feature.name: feature for feature in _diagnosis.storage_features("/dev/shm")}
    assert found["device"].state is State.DEGRADED
    assert "memory" in found["device"].why


def test_an_nvme_path_that_is_down(tmp_path: Path) -> None:
    for name, state in (("nvme0", "live"), ("nvme1", "connecting")):
        folder = tmp_path / "class/nvme" / name
        folder.mkdir(parents=True)
        for attribute, value in (("transport", "tcp"), ("state", state), ("queue_count", "9")):
            (folder / attribute).write_text(value + "\n")
    up, down = _diagnosis.nvme_features(tmp_path)
    assert (up.state, up.why) == (State.OK, "nvme tcp, live, 8 I/O queues"), (
        "the admin queue counts as none"
    )
    assert down.state is State.DEGRADED and "connecting" in down.why


def test_requests_of_a_multipath_disk_have_other_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvme, "paths_of_head", lambda name: ["nvme0c0n1", "nvme0c1n1"])
    storage = PathStorage(str(tmp_path), 1, "ext4", "/", DeviceFacts(1, "nvme0n1", "nvme tcp"))
    found = {feature.name: feature.why for feature in _diagnosis._path_features(storage)}
    assert found["paths"].endswith("numbers of its 2 paths: nvme0c0n1, nvme0c1n1")
    monkeypatch.setattr(nvme, "paths_of_head", lambda name: [])
    assert "paths" not in {feature.name for feature in _diagnosis._path_features(storage)}


# ---------------------------------------------------------------- text

SAMPLE = (
    Feature("kernel", "good thing", State.OK, "is there"),
    Feature("kernel", "lesser thing", State.DEGRADED, "half " * 20, "misses " * 12, "sudo repair"),
    Feature("loaders", "core", State.ABSENT, "is not there", "no capture", "apt install x", True),
    Feature("GPU", "gpu", State.UNKNOWN, "needs root to find out"),
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_fit_and_commands_are_whole(width: int) -> None:
    text = list(lines(SAMPLE, "In short. " * 20, Style(width, ascii_only=False, colour=False)))
    assert all(len(line) <= width for line in text)
    assert [line.strip() for line in text if "fix:" in line] == [
        "fix: sudo repair",
        "fix: apt install x",
    ]
    signs = [line[2] for line in text if re.match(r"  \S ", line)]
    assert signs == ["✓", "!", "✗", "?"]


def test_plain_signs_where_the_encoding_has_no_others() -> None:
    text = list(lines(SAMPLE, "", Style(80, ascii_only=True, colour=False)))
    assert all(line.isascii() for line in text)
    assert [line[2] for line in text if re.match(r"  \S ", line)] == ["+", "!", "x", "?"]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def stream(encoding: str) -> TextIO:
    return Terminal(io.BytesIO(), encoding=encoding)


def test_style_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "97")
    style = Style.of(stream("utf-8"))
    assert (style.width, style.ascii_only, style.colour) == (97, False, True)
    assert style.sign("bad") == "\x1b[31m✗\x1b[0m"
    assert Style.of(stream("ascii")).ascii_only
    assert Style.of(stream("latin-1")).ascii_only
    monkeypatch.setenv("COLUMNS", "500")
    assert Style.of(stream("utf-8")).width == _terminal._WIDTHS[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of(stream("utf-8")).colour
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not Style.of(stream("utf-8")).colour
    assert not Style.of(io.StringIO()).colour


# ---------------------------------------------------------------- probes


def test_every_probe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.stem: path for path in content.directory("probes").glob("*.toml")}
    assert main(["probes", "--json"]) == 0
    listed = {p["name"]: p for p in json.loads(capsys.readouterr().out)["probes"]}
    assert listed.keys() == files.keys()
    for name, path in files.items():
        written = tomllib.loads(path.read_text())
        for key in ("summary", "table", "ring_bytes"):
            assert listed[name][key] == written[key]
        sources = (*path.parent.glob(f"{name}*.bpf.c"), *path.parent.glob(f"{name}_*.bpf.h"))
        source = "".join(file.read_text() for file in sources)
        assert all(event["program"] in source for event in listed[name]["events"])
    assert main(["probes"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: " in text for name in files)


def test_a_module_that_is_not_loaded_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readiness, "is_loaded", lambda module: not module)
    monkeypatch.setattr(machine, "is_loaded", lambda module: not module)
    assert main(["probes"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    (fabric,) = (part for part in parts if part.startswith("fabric: "))
    assert fabric.count("nvme_core") == 1 and "module nvme_core is not loaded" in fabric
    (events,) = (line for line in fabric.splitlines() if " tcp_retransmit_skb" in line)
    assert "!" not in events and "- tcp_retransmit_skb" in events
    assert main(["probes", "--json"]) == 0
    listed = {p["name"]: p for p in json.loads(capsys.readouterr().out)["probes"]}
    assert {event["exists"] for event in listed["fabric"]["events"]} == {None}
    assert listed["fabric"]["hides"] == {} and "nvme_core" in listed["fabric"]["no_purpose"]
    assert listed["block"]["no_purpose"] == ""


def test_an_event_that_this_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Btf.tracepoint_args
    monkeypatch.setattr(
        Btf,
        "tracepoint_args",
        lambda self, name: None if name == "block_rq_issue" else real(self, name),
    )
    assert main(["probes", "--json"]) == 0
    block = next(p for p in json.loads(capsys.readouterr().out)["probes"] if p["name"] == "block")
    exists = {event["event"]: event["exists"] for event in block["events"]}
    assert exists["block_rq_issue"] is False and exists["block_rq_complete"] is True
    assert "device time" in block["hides"]["block_rq_issue"]
    found = _diagnosis.diagnose(None)
    missing = next(feature for feature in found.features if feature.name == "block_rq_issue")
    assert missing.state is State.DEGRADED and "device time" in missing.effect
    assert found.capture_possible == (os.geteuid() == 0)
    assert "block_rq_issue" in found.summary or os.geteuid() != 0
