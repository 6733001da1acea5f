from pathlib import Path

import pytest

from tests.gpu.standin import build


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver of today."""
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver before GPM."""
    return build(tmp_path_factory.mktemp("old-driver"), "-DOLD_DRIVER")
