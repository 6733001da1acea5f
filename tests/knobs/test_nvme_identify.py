"""Limits in an answer to Identify, at the places that the specification gives them."""

import struct
from pathlib import Path

import pytest

from kvprobe.knobs import nvme_identify
from kvprobe.knobs._subjects import Roots, Subjects
from kvprobe.knobs.nvme_identify import BYTES, IN_CAPSULE, KIND, MDTS, MOST_COMMANDS, limits
from tests.knobs.trees import Tree, plant


def answer(mdts: int, maxcmd: int, ioccsz: int) -> bytes:
    made = bytearray(b"\xa5" * BYTES)
    made[77] = mdts
    struct.pack_into("<H", made, 514, maxcmd)
    struct.pack_into("<I", made, 1792, ioccsz)
    return bytes(made)


def test_limits_that_are_stated() -> None:
    # nvmet over TCP: 16 KiB in the capsule; QEMU's mdts=5 is 128 KiB
    found = limits(answer(5, 1024, 1028))
    assert found == {MDTS: 131_072, MOST_COMMANDS: 1024, IN_CAPSULE: 16_384}


def test_limits_that_are_not() -> None:
    assert limits(answer(0, 0, 0)) == {MDTS: None, MOST_COMMANDS: None, IN_CAPSULE: None}
    assert limits(answer(255, 0, 3))[MDTS] is None
    assert limits(b"\xff" * BYTES)[IN_CAPSULE] == 0xFFFFFFFF * 16 - 64


@pytest.fixture
def machine(tmp_path: Path) -> Tree:
    tree = plant("6.12-tcp", tmp_path / "machine")
    tree.write("dev/nvme0", "")
    return tree


def read(roots: Roots) -> dict[str, tuple[str | None, str]]:
    subjects = Subjects(controllers=("nvme0", "nvme1"), roots=roots)
    return {each.knob.name: (each.value, each.note) for each in KIND.read(subjects)}


def test_a_controller_that_answers(machine: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def identify(node: Path) -> bytes:
        asked.append(node)
        return answer(0, 131, 1028)

    monkeypatch.setattr(nvme_identify, "identify", identify)
    assert read(machine.roots) == {
        "mdts": ("0", "0: no limit is stated"),
        "in_capsule_size": ("16384", ""),
        "maxcmd": ("131", ""),
    }
    assert asked == [machine.roots.dev / "nvme0"], "nvme1 has no node"


def test_a_node_that_is_no_controller(machine: Tree) -> None:
    assert read(machine.roots)["mdts"][0] is None


def test_a_path_in_trouble_is_not_asked(machine: Tree) -> None:
    machine.write("sys/class/nvme/nvme0/state", "connecting\n")
    assert read(machine.roots) == {}
