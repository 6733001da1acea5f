"""What all tests share: root, no skips in CI, one hypothesis profile."""

import os

import pytest
from hypothesis import settings

# The machines that run the tests are small and shared: a slow example is no failure.
settings.register_profile("kvprobe", deadline=None, max_examples=50)
settings.load_profile("kvprobe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips", action="store_true", help="a skipped test fails the run (CI)"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: run the tests with sudo")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus or reporter is None or not session.config.getoption("--forbid-skips"):
        return
    if reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
