"""`make demo` as a user sees it: on recorded captures, and for real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvprobe.capture.reader import open_capture
from kvprobe.correlator import correlate

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, str(ROOT / "demo.py"))
GAIN = re.compile(r"gain +(-?\d+)% \((-?\d+)% to (-?\d+)%\) +(-?\d+)% \((-?\d+)% to (-?\d+)%\)")


def gains(output: str) -> list[tuple[int, ...]]:
    """Predicted and measured gains with their intervals, restore first."""
    found = [tuple(map(int, match.groups())) for match in GAIN.finditer(output)]
    for mid, low, high, measured, measured_low, measured_high in found:
        assert low <= mid <= high
        assert measured_low <= measured <= measured_high
    return found


def mount_of(output: str) -> str:
    """Where the demo's own file system was mounted."""
    line = next(line for line in output.splitlines() if "file system of our own" in line)
    return line.split()[6]


def test_recorded_captures_show_the_whole_story() -> None:
    done = subprocess.run((*COMMAND, "--recorded"), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Not tracing here" in done.stdout
    assert len(gains(done.stdout)) == 2
    with open_capture(ROOT / "tests" / "data" / "demo" / "before.kvcap") as capture:
        assert len(correlate(capture).accounts) == 211


@pytest.mark.root
@pytest.mark.timeout(300)
def test_the_real_demo_predicts_and_measures(tmp_path: Path) -> None:
    command = (*COMMAND, "--keep", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    restore, first_token = gains(done.stdout)
    # The device of a test machine may do anything; that larger units and more depth help a loop
    # device that is read 64 KiB at a time is sure.
    assert restore[3] > 20 and first_token[3] > 0
    with open_capture(tmp_path / "before.kvcap") as capture:
        ledger = correlate(capture)
    assert len(ledger.accounts) == 211
    assert all(account.restore for account in ledger.accounts)
    assert not Path(mount_of(done.stdout)).exists()


@pytest.mark.root
def test_interrupted_it_cleans_up() -> None:
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        mount = ""
        for line in demo.stdout:
            if "file system of our own" in line:
                mount = mount_of(line)
            if line.startswith("$ kvprobe capture"):
                break
        assert mount in Path("/proc/mounts").read_text()
        time.sleep(1)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        assert "interrupted" in demo.stdout.read()
        assert demo.wait(60) == 130
    assert mount not in Path("/proc/mounts").read_text()
    assert not Path(mount).exists()
