"""Servers that the tests of one engine share, each started once, on a file system of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.workload.scratch import Scratch
from tests.live.engine_disk import disk_folder
from tests.live.engine_node import FsTierNode, LMCacheNode
from tests.live.engine_process import EngineMissingError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is live, and slow to start."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.live)
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def disk() -> Iterator[Scratch]:
    """A folder of its own on a disk that can be slowed down."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run the tests with sudo")
    with disk_folder() as made:
        yield made


@pytest.fixture(scope="session")
def fs_tier(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsTierNode]:
    """vLLM with its fs tier, some prompts stored."""
    try:
        with FsTierNode(Path(disk.root), tmp_path_factory.mktemp("kvprobe-vllm")) as node:
            yield node
    except EngineMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def lmcache(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheNode]:
    """vLLM with LMCache's server, some prompts stored."""
    try:
        with LMCacheNode(Path(disk.root), tmp_path_factory.mktemp("kvprobe-lmcache")) as node:
            yield node
    except EngineMissingError as missing:
        pytest.skip(str(missing))
