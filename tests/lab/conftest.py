"""One boot for each kernel that the chosen tests need; all their cases run in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.guest import REPOSITORY, Machine, run

FIXED_SECONDS = 90
JOB_SECONDS = 120
"""A bound for hangs, not what a case takes."""


@pytest.fixture(scope="session")
def guest_results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Function of kernel and job: the folder of its results."""
    booted: dict[str, Path] = {}

    def results(kernel: str, job: str) -> Path:
        if kernel not in booted:
            jobs = _jobs_of(request.session.items, kernel)
            booted[kernel] = _boot(kernel, jobs, tmp_path_factory.mktemp(f"kvprobe-lab-{kernel}"))
        return booted[kernel] / job

    return results


def _jobs_of(items: list[pytest.Item], kernel: str) -> list[str]:
    """What the chosen tests need of a guest, in order."""
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(c["job"] for c in calls if c.get("kernel") == kernel and "job" in c))


def _boot(kernel: str, jobs: list[str], folder: Path) -> Path:
    machine = Machine(pci_nvme_mib=1024, timeout_s=FIXED_SECONDS + JOB_SECONDS * len(jobs))
    python = str(REPOSITORY / ".venv" / "bin" / "python")
    with (folder / "agent.log").open("wb") as log:
        outcome = run(kernel, [python, "-m", "tests.lab.agent", *jobs], folder, machine, log)
    if outcome.status not in (0, 1):  # 1: a case failed, its own test says which and why
        log_end = (folder / "agent.log").read_text(errors="replace")[-2000:]
        pytest.fail(
            f"guest {kernel}: status {outcome.status}\n{log_end}\n{outcome.console[-4000:]}"
        )
    return folder
