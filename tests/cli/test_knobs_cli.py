"""``kvprobe knobs`` and the chain of ``kvprobe doctor --path``: text, shape, errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe import knobs
from kvprobe.cli import main
from kvprobe.commands._terminal import Style
from kvprobe.commands.knobs import document, lines
from kvprobe.knobs import Family, Reach
from tests.knobs.trees import plant

GOLDEN = Path(__file__).parents[1] / "data/knobs_6.1-tcp.txt"
KEYS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "family": str,
    "subject": str,
    "value": (str, type(None)),
    "unit": str,
    "source": str,
    "reachability": str,
    "note": str,
    "meaning": str,
    "default": str,
    "allowed": str,
    "ignored": str,
    "risk": str,
    "undo": str,
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    return value


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = printed(capsys, "knobs")
    assert value.keys() == {"schema_version", "knobs"} and value["schema_version"] == 1
    assert value["knobs"]
    for each in value["knobs"]:
        assert each.keys() == KEYS.keys()
        assert all(isinstance(each[key], kind) for key, kind in KEYS.items())
        assert each["family"] in {*Family} and each["reachability"] in {*Reach}
        assert Path(each["source"]).exists()


def test_one_family(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "knobs", "--family", "queue_depth")["knobs"]
    assert {each["family"] for each in found} == {"queue_depth"}


def test_path_and_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = printed(capsys, "knobs", "--path", str(tmp_path))["knobs"]
    doctor = knobs.of_path(str(tmp_path))
    assert {each["subject"] for each in found} <= {
        *doctor.disks,
        *(mount.point for mount in doctor.mounts),
        *doctor.numbers.values(),
        "host",
    } | {each["subject"] for each in found if each["name"].startswith("io.")}
    if doctor.disks:
        disk = printed(capsys, "knobs", "--device", doctor.disks[0])["knobs"]
        assert disk and {e["name"] for e in disk} >= {"read_ahead_kb"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "nvme77n1"], "no block device 'nvme77n1'"),
        (["--path", "/nonexistent/kv"], "cannot look at /nonexistent/kv"),
        (["--family", "speed"], "invalid choice: 'speed'"),
        (["--path", "/", "--device", "x"], "not allowed with argument"),
    ],
)
def test_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["knobs", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err
    assert len(captured.err.splitlines()) == 2 and "hint: " in captured.err


@pytest.mark.parametrize("verb", ["knobs", "capture"])
def test_a_wrong_disk_and_those_that_are_here(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--device", "nope", *(["-d", "1"] if verb == "capture" else [])]) in (2, 3)
    *_, message, hint = capsys.readouterr().err.splitlines()
    if "needs root" not in message:
        assert message == "kvprobe: no block device 'nope'"
        sizes = {p.parent.name: p.read_text().strip() for p in Path("/sys/block").glob("*/size")}
        here = sorted(name for name, sectors in sizes.items() if sectors != "0")
        assert hint == f"hint: whole disks here: {', '.join(here) or 'none'}"


def test_no_limit_is_in_words(tmp_path: Path) -> None:
    tree = plant("6.1-tcp", tmp_path)
    tree.write("sys/block/nvme0c0n1/queue/max_hw_sectors_kb", "2147483646\n")
    found = knobs.read_all(knobs.of_device("nvme0n1", tree.roots), Family.BLOCK_SIZE)
    rows = [line for line in lines(found, Style(100, False, False)) if "max_hw_sect" in line]
    assert [row.split()[1:3] for row in rows] == [["2147483646", "KiB"], ["no", "limit"]]
    (listed,) = {
        each["value"] for each in document(found)["knobs"] if each["name"] == "max_segment_size"
    }
    assert listed == "4294967295", "JSON has the kernel's own"


def test_golden_text(tmp_path: Path) -> None:
    tree = plant("6.1-tcp", tmp_path)
    found = knobs.read_all(knobs.of_device("nvme0n1", tree.roots))
    text = "\n".join(lines(found, Style(100, ascii_only=False, colour=False))) + "\n"
    assert text == GOLDEN.read_text()


def test_subjects_with_one_value_share_a_row(tmp_path: Path) -> None:
    tree = plant("6.12-tcp", tmp_path)
    found = knobs.read_all(knobs.of_device("nvme0n1", tree.roots), Family.PREFETCH)
    rows = [line for line in lines(found, Style(100, False, False)) if "read_ahead_kb" in line]
    assert len(rows) == 2
    assert rows[0].endswith("nvme0c0n1, nvme0c1n1") and rows[1].endswith("new opens      nvme0n1")
    listed = [each["subject"] for each in document(found)["knobs"] if "ahead_kb" in each["name"]]
    assert listed == ["nvme0c0n1", "nvme0c1n1", "nvme0n1"], "not in JSON"


def test_the_chain_of_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--path", str(tmp_path), "--json"]) in (0, 3)
    chain = json.loads(capsys.readouterr().out)["chain"]
    assert chain["kind"] == "mount" and str(tmp_path).startswith(chain["name"])
    assert main(["doctor", "--path", str(tmp_path)]) in (0, 3)
    text = capsys.readouterr().out.split("from the path to the queues\n")[1].splitlines()
    assert text[0].startswith(f"  {chain['name']} (")
    layer, depth = chain, 1
    while layer["below"]:
        (layer,) = layer["below"]
        assert layer["name"] in text[depth]
        depth += 1
    assert sum("queue" in line for line in text) >= min(1, len(layer["queues"]))
