"""What the BPF programs cost, by the kernel's own run-time statistics.

Statistics themselves cost two clock readings a run, so they are on for a small share of the time:
a window at the start, then one every two seconds. The cost of reading the clock is measured with a
program that does nothing, and subtracted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from kvprobe.bpf import trial
from kvprobe.bpf.attach import bpf
from kvprobe.model import ProgramCost

WINDOW_NS = 100_000_000
PERIOD_NS = 2_000_000_000
_BPF_PROG_TEST_RUN = 10
_CALIBRATION_RUNS = 500


class CostMeter:
    """Counts runs and net run time of programs while its windows are open.

    Args:
        programs: name -> descriptor.
    """

    def __init__(self, programs: Mapping[str, int]) -> None:
        self._programs = programs
        self._statistics: int | None = None
        self._opened_ns = self._next_ns = 0
        self._begin: dict[str, tuple[int, int]] = {}
        self._sums = dict.fromkeys(programs, (0, 0))
        self.measured_ns = 0
        self.supported = True
        self.clock_ns = 0.0
        try:
            self.clock_ns = _clock_cost_ns()
        except OSError:
            self.supported = False

    def tick(self, now_ns: int) -> None:
        """Open or close a window when it is time; cheap, called at every poll."""
        if self._statistics is not None and now_ns - self._opened_ns >= WINDOW_NS:
            self.stop(now_ns)
        elif self._statistics is None and now_ns >= self._next_ns:
            self.start(now_ns)

    def start(self, now_ns: int) -> None:
        """Open a window."""
        if not self.supported or self._statistics is not None:
            return
        self._begin = self._read()
        self._statistics = trial.statistics()
        self._opened_ns = now_ns
        self._next_ns = now_ns + PERIOD_NS

    def stop(self, now_ns: int) -> None:
        """Close the window and add what was counted in it."""
        if self._statistics is None:
            return
        for name, (runs, run_ns) in self._read().items():
            before_runs, before_ns = self._begin[name]
            sum_runs, sum_ns = self._sums[name]
            self._sums[name] = (sum_runs + runs - before_runs, sum_ns + run_ns - before_ns)
        os.close(self._statistics)
        self._statistics = None
        self.measured_ns += now_ns - self._opened_ns

    def costs(self) -> tuple[ProgramCost, ...]:
        """Runs and net time of each program within the windows; empty where unsupported."""
        if not self.supported:
            return ()
        return tuple(
            ProgramCost(name, runs, max(0, round(run_ns - runs * self.clock_ns)))
            for name, (runs, run_ns) in self._sums.items()
        )

    def _read(self) -> dict[str, tuple[int, int]]:
        return {name: _statistics_of(program) for name, program in self._programs.items()}


def _statistics_of(program: int) -> tuple[int, int]:
    """Runs and nanoseconds of one program since it was loaded, while statistics were on."""
    runs = run_ns = 0
    for line in Path(f"/proc/self/fdinfo/{program}").read_text().splitlines():
        if line.startswith("run_cnt:"):
            runs = int(line.split()[1])
        elif line.startswith("run_time_ns:"):
            run_ns = int(line.split()[1])
    return runs, run_ns


def _clock_cost_ns() -> float:
    """What statistics show for a program that does nothing.

    Raises:
        OSError: the kernel has no run-time statistics or cannot run a program on request.
    """
    program = trial.program()
    try:
        statistics = trial.statistics()
        try:
            for _ in range(_CALIBRATION_RUNS):
                bpf(_BPF_PROG_TEST_RUN, struct.pack("=IIIIQQ", program, 0, 0, 0, 0, 0))
        finally:
            os.close(statistics)
        runs, run_ns = _statistics_of(program)
    finally:
        os.close(program)
    return run_ns / runs if runs else 0.0
