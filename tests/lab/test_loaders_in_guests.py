"""Both loaders on other kernels: known work, exact numbers, equal rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab import functions
from tests.lab.kernels import SOURCES

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(7200)]

WHOLE_PAGES = 1 + 53
"""Blocks of 4 KiB that are read through the page cache, one by one."""


@pytest.fixture
def facts(kernel: str, job: str, guest_results: Callable[[str, str], Path]) -> dict[str, Any]:
    folder = guest_results(kernel, job)
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    found: dict[str, Any] = json.loads((folder / "loaders.json").read_text())
    return found


@pytest.mark.parametrize("job", ["loaders"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_both_loaders_see_the_same(facts: dict[str, Any]) -> None:
    files = facts["files"]
    assert files["loaders"] == {"core": "core", "bcc": "bcc"}
    assert files["lost"] == {"core": 0, "bcc": 0}
    assert not [table for table, found in files["differences"].items() if found["different"]]
    assert files["histogram"]["core"] == files["histogram"]["bcc"]


@pytest.mark.parametrize("job", ["loaders"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_requests_are_those_of_the_work(facts: dict[str, Any]) -> None:
    files = facts["files"]
    assert files["block"]["kinds"] == {
        "read DIRECT 12288": {"rows": 83, "by_us": 0},
        "read DIRECT 20480": {"rows": 59, "by_us": 0},
        "read DIRECT 28672": {"rows": 101, "by_us": 101},
        "read PAGE 4096": {"rows": WHOLE_PAGES, "by_us": WHOLE_PAGES},
        "write DIRECT 8192": {"rows": 37, "by_us": 37},
    }
    assert files["block"]["offsets"] == 101
    assert files["block"]["in_order"] and files["block"]["fs_device"]
    assert files["written_bytes"] == 65536
    counted = {key: value for key, value in files["counted"].items() if key != "flush"}
    assert files["histogram"]["core"] == counted


@pytest.mark.parametrize("job", ["loaders"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_calls_are_those_of_the_work(facts: dict[str, Any]) -> None:
    assert facts["files"]["ops"] == {
        "PREAD64": [53, 53 * 4096],
        "READV": [1, 1009 + 3001],
        "PREADV2": [101, 101 * 28672],
        "URING_READ": [59, 59 * 20480],
        "LIBAIO_READ": [83, 83 * 12288],
        "PWRITE64": [1, 65536],
        "PWRITEV2": [37, 37 * 8192],
    }
    lookups = facts["files"]["lookups"]
    assert lookups["ACCESS"] == [11, 0]
    assert (lookups["RENAME_FROM"], lookups["RENAME_TO"]) == ([1, 0], [1, 0])
    assert lookups["STAT"][0] >= 7 and lookups["OPEN"][0] >= 3  # fio looks, too


@pytest.mark.parametrize("job", ["loaders"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_the_disk_itself(facts: dict[str, Any]) -> None:
    raw = facts["raw"]
    assert raw["alone"] == {"rows": 17, "threads": [0]}
    found = raw["asynchronous"]
    assert (found["rows"], found["methods"], found["inodes"]) == (19, [3], [found["inode"]])


@pytest.mark.parametrize("job", ["loaders"])
@pytest.mark.parametrize("kernel", list(SOURCES))
def test_function_probes_see_arguments_and_results(facts: dict[str, Any]) -> None:
    assert facts["functions"] == {"core": functions.EXPECTED, "bcc": functions.EXPECTED}
