"""The stand-in library, and sessions of both loaders on a process that uses it."""

from pathlib import Path

import pytest

from tests.gds.cufile_process import build


@pytest.fixture(scope="session")
def cufile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in's path."""
    return build(tmp_path_factory.mktemp("kvprobe-cufile"))


@pytest.fixture
def kv_file(tmp_path: Path) -> Path:
    """A file of 8 MiB."""
    path = tmp_path / "chunk"
    path.write_bytes(bytes(range(256)) * 32768)
    return path
