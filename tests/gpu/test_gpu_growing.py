"""The stand-in driver takes in a log while it is written: a gauge for the tests that lean on it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.standin import ROOT, Script, environment

READER = """
import sys, time, pynvml as nvml
nvml.nvmlInit()
device = nvml.nvmlDeviceGetHandleByIndex(0)
for line in sys.stdin:
    began = time.monotonic()
    for _ in range(int(line)):
        power = nvml.nvmlDeviceGetPowerUsage(device)
    print(power, (time.monotonic() - began) / int(line), flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_lines_count_once_they_are_whole(driver: Path, tmp_path: Path, log: Path) -> None:
    Script().write(tmp_path / "script", 1)
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(driver, tmp_path / "script", log), cwd=ROOT,
    ) as reader:  # fmt: skip
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask(times: int = 1) -> tuple[int, float]:
            reader.stdin.write(f"{times}\n")  # type: ignore[union-attr]
            reader.stdin.flush()  # type: ignore[union-attr]
            power, seconds = reader.stdout.readline().split()  # type: ignore[union-attr]
            return int(power), float(seconds)

        assert ask()[0] == 312_345  # the log is not there yet
        with log.open("w", buffering=1) as file:
            file.write(f"epoch {time.monotonic_ns()}\n")
            file.write("value 0 power_mw 0.000001 7919\n")
            assert ask()[0] == 7919
            file.write("value 0 power_mw 0.000002 104")
            file.flush()
            assert ask()[0] == 7919  # half a line
            file.write("729\nvalue 0 power_mw 3600 13\n")
            assert ask()[0] == 104_729  # and none of the future
            file.write("".join(f"value 0 gpm1 0.{n:06d} {n % 97}\n" for n in range(3, 100_003)))
            file.write("value 0 power_mw 0.100003 6007\n")
            assert ask()[0] == 6007
        assert ask(101)[1] < 0.005
        reader.stdin.close()
        assert reader.wait(10) == 0
