"""One boot for each kernel that the chosen tests need; all their cases run in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.guest import REPOSITORY, Machine, run
from tests.lab.kernels import LabError

FIXED_SECONDS = 90
JOB_SECONDS = 120
"""A bound for hangs, not what a case takes."""
BOOTS = 3
DONE = ("facts.json", "doctor.txt", "compile.json", "loaders.json", "error.txt")


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
    jobs = dict.fromkeys(c["job"] for c in calls if c.get("kernel") == kernel and "job" in c)
    return sorted(jobs, key=lambda job: job != "doctor")  # names of devices as of a fresh boot


def _boot(kernel: str, jobs: list[str], folder: Path) -> Path:
    """Run the jobs; what a guest that failed has not done is done by the next.

    Emulated processors now and then run into code that the kernel is just changing.
    """
    python = str(REPOSITORY / ".venv" / "bin" / "python")
    for boot in range(1, BOOTS + 1):
        left = [job for job in jobs if not _is_done(folder / job)]
        for job in left:
            shutil.rmtree(folder / job, ignore_errors=True)
        machine = Machine(pci_nvme_mib=1024, timeout_s=FIXED_SECONDS + JOB_SECONDS * len(left))
        command = [python, "-m", "tests.lab.agent", *left]
        try:
            with (folder / "agent.log").open("ab") as log:
                outcome = run(kernel, command, folder, machine, log)
        except LabError as error:
            pytest.skip(f"no guest here: {error}")
        if outcome.status in (0, 1):  # 1: a case failed, its own test says which and why
            return folder
        (folder / f"console-{boot}").write_text(outcome.console)
    log_end = (folder / "agent.log").read_text(errors="replace")[-2000:]
    pytest.fail(f"guest {kernel}: status {outcome.status}\n{log_end}\n{outcome.console[-4000:]}")


def _is_done(folder: Path) -> bool:
    return any((folder / name).exists() for name in DONE)
