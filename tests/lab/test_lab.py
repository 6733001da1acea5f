"""Other kernels, real NVMe targets: each case of `cases/` in a guest, its capture checked here."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import case as cases
from tests.lab.check import check, open_result
from tests.lab.kernels import SOURCES

pytestmark = [pytest.mark.root, pytest.mark.timeout(7200)]
GOLDEN = Path(__file__).parent / "golden"
SECTIONS = ("kernel", "loaders", "events", "storage", "from the path to the queues")
Results = Callable[[str, str], Path]


def _all() -> Iterator[object]:
    for name in cases.names():
        case = cases.load(name)
        for kernel in case.kernels:
            marks = () if case.core else pytest.mark.lab
            yield pytest.param(kernel, name, id=f"{kernel}-{name}", marks=marks)


@pytest.mark.parametrize(("kernel", "job"), list(_all()))
def test_case(kernel: str, job: str, guest_results: Results) -> None:
    case = cases.load(job)
    result = open_result(case, guest_results(kernel, job))
    with result.capture:
        check(result)


@pytest.mark.lab
@pytest.mark.parametrize("job", ["compile"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_every_probe_compiles_from_btf_alone(kernel: str, job: str, guest_results: Results) -> None:
    folder = guest_results(kernel, job)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    facts = json.loads((folder / "compile.json").read_text())
    assert facts["headers"] is False
    assert facts["loader"] == "bcc"
    assert all(facts["attached"].values()), facts
    from kvprobe.bpf.catalog import available
    from kvprobe.bpf.compose import FILTERS

    # A guest has no library of GPUs; tests/gds compiles and attaches that probe where one is.
    wanted = {name for name, probe in available().items() if not probe.library}
    assert set(facts["attached"]) == {*wanted, FILTERS}, facts["missing"]
    assert [gap["what"] for gap in facts["missing"]] == ["library libcufile.so"]


@pytest.mark.lab
@pytest.mark.parametrize("job", ["doctor"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_doctor_says_what_it_said(kernel: str, job: str, guest_results: Results) -> None:
    folder = guest_results(kernel, job)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    said = folder / f"doctor-{kernel}.txt"
    said.write_text(_of_the_guest((folder / "doctor.txt").read_text()))
    known = GOLDEN / said.name
    assert known.exists(), f"no {known}; if {said} is right, copy it there"
    assert said.read_text() == known.read_text(), f"if {said} is right, copy it to {known}"


def test_doctor_on_a_kernel_without_nvme_and_function_probes() -> None:
    """The host of CI: what is not visible is named, with the reason."""
    known = GOLDEN / f"doctor-host-{'.'.join(platform.release().split('.')[:2])}.txt"
    if not known.exists():
        pytest.skip(f"no {known.name}: doctor's words are known for CI's kernel only")
    command = [sys.executable, "-m", "kvprobe", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    about_the_kernel = ran.stdout.partition("\nstorage\n")[0] + "\n"
    assert _of_the_guest(about_the_kernel) == known.read_text()


def _of_the_guest(text: str) -> str:
    """Without what the host's file tree brings in, and without what an update changes."""
    parts = text.rstrip().split("\n\n")
    text = "\n\n".join(part for part in parts if part.split("\n")[0] in SECTIONS) + "\n"
    for pattern in (
        r"Linux \S+",
        r"[\d.]+ [KM]iB of kernel type information",
        r"\d\S* is installed",
    ):
        text = re.sub(pattern, lambda found: re.sub(r"\d\S*", "N", found[0]), text)
    return text
