"""The lab's checks can fail: what a capture got wrong is noticed, and so is a misspelt case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvprobe.capture.reader import Capture
from kvprobe.model import Frame
from tests.lab import case as cases
from tests.lab.check import Result, check, open_result
from tests.lab.initramfs import _Archive
from tests.lab.kernels import LabError, extract_image, kernel

Change = Callable[[Frame], Frame]


class Altered:
    """A capture of which one table is different."""

    def __init__(self, capture: Capture, table: str, change: Change) -> None:
        self._capture, self._table, self._change = capture, table, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def frame(self, table: str) -> Frame:
        frame = {name: column.copy() for name, column in self._capture.frame(table).items()}
        return self._change(frame) if table == self._table else frame


def altered(result: Result, table: str, change: Change) -> Result:
    return replace(result, capture=cast(Capture, Altered(result.capture, table, change)))


def fewer_bytes(frame: Frame) -> Frame:
    frame["bytes"][frame["bytes"].argmax()] -= 512
    return frame


def two_swapped(frame: Frame) -> Frame:
    """Two commands say that they belong to each other's request."""
    request, first = frame["request"], int(frame["bytes"].argmax())
    # One that had the same piece of memory at another time would stay as it is.
    second = int(((frame["bytes"] == 4096) & (request != request[first])).argmax())
    request[first], request[second] = request[second], request[first]
    return frame


def sent_early(frame: Frame) -> Frame:
    frame["sent_ns"][len(frame["sent_ns"]) // 2] = 1
    return frame


@pytest.mark.root
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kernel", "job"), [("6.12", "tcp-counts")])
@pytest.mark.parametrize("change", [fewer_bytes, two_swapped, sent_early])
def test_a_wrong_command_is_noticed(
    kernel: str, job: str, change: Change, guest_results: Callable[[str, str], Path]
) -> None:
    result = open_result(cases.load(job), guest_results(kernel, job))
    with result.capture, pytest.raises(AssertionError):
        check(altered(result, "nvme", change))


def test_every_case_can_be_read_and_has_something_to_prove() -> None:
    for name in cases.names():
        expected = cases.load(name).expected
        assert expected.bytes or expected.findings or expected.no_findings, name


@pytest.mark.parametrize(
    ("line", "word"),
    [("surprise = 1", "surprise"), ('transport = "carrier"', "carrier"), ("pahts = 2", "pahts")],
)
def test_a_misspelt_case_is_refused(
    line: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (cases.CASES / "null-counts.toml").read_text()
    if "transport" in line:
        known = known.replace('transport = "none"', line)
    else:
        table = "[topology]" if line.startswith("pahts") else "[expected]"
        known = known.replace(table, f"{table}\n{line}")
    (tmp_path / "odd.toml").write_text(known)
    monkeypatch.setattr(cases, "CASES", tmp_path)
    with pytest.raises(ValueError, match=word):
        cases.load("odd")


def test_an_unknown_kernel_is_one_line() -> None:
    with pytest.raises(LabError, match=r"no kernel 2\.4"):
        kernel("2.4")


def test_what_is_no_kernel_image_is_refused() -> None:
    with pytest.raises(LabError, match="no bzImage"):
        extract_image(bytes(4096))


def test_the_archive_is_what_cpio_makes() -> None:
    archive = _Archive()
    archive.folder("bin")
    archive.file("bin/tool", b"12345", 0o755)
    made = archive.finish()
    assert len(made) % 4 == 0
    assert made.startswith(b"070701")
    assert made.count(b"070701") == 3
    assert b"bin/tool\0" in made and b"12345\0\0\0" in made
