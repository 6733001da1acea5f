"""Other kernels, real NVMe targets: each case of `cases/` in a guest, its capture checked here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import case as cases
from tests.lab.check import check, open_result
from tests.lab.kernels import SOURCES

pytestmark = [pytest.mark.root, pytest.mark.timeout(7200)]
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

    assert set(facts["attached"]) == set(available()), facts["missing"]
