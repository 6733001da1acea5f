"""Servers that the tests of one engine share, each started once, on a file system of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe.workload.scratch import Scratch, scratch_filesystem
from tests.live.engine_node import FsTierNode, LMCacheNode
from tests.live.engine_process import EngineMissingError

DISK_BYTES = 4 << 30


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
    """A file system of its own, on a device of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run the tests with sudo")
    with scratch_filesystem(DISK_BYTES) as made:
        yield made


@pytest.fixture(scope="module")
def fs_tier(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsTierNode]:
    """vLLM with its fs tier, some prompts stored."""
    try:
        with FsTierNode(Path(disk.root), tmp_path_factory.mktemp("kvprobe-vllm")) as node:
            yield node
    except EngineMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def lmcache(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheNode]:
    """vLLM with LMCache's server, some prompts stored."""
    try:
        with LMCacheNode(Path(disk.root), tmp_path_factory.mktemp("kvprobe-lmcache")) as node:
            yield node
    except EngineMissingError as missing:
        pytest.skip(str(missing))
