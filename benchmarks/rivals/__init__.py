"""Tracers of block I/O under one interface: kvprobe and what else there is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvprobe.errors import KvprobeError

START_SECONDS = 60.0
SETTLE_SECONDS = 1.0
"""For the backlog of the last reads."""
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Traced:
    """What a tracer delivered and used up: rows are block requests, one row for each."""

    rows: int
    lost: int | None
    """By the tracer's own count; None where it has none."""
    user_seconds: float
    system_seconds: float
    peak_bytes: int
    more: dict[str, Any] = field(default_factory=dict)


class Running(Protocol):
    """A tracer at work; ``stop`` may be called again and ends it whatever happens."""

    pid: int

    def stop(self) -> Traced:
        """Let it finish what it has, and end it."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


@dataclass(frozen=True)
class Tracer:
    """``start`` takes dev_t and name of the disk to trace and returns once it is attached."""

    name: str
    what: str
    start: Callable[[int, str], Running]


class Output:
    """Where a tracer writes its lines: memory, so that writing them adds no I/O to be traced."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvprobe-bench", os.MFD_CLOEXEC)

    def text(self) -> str:
        """All that was written so far."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Free it; may be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class LineTracer:
    """A program that prints a line for each request until it is interrupted.

    Args:
        command: its words.
        row: matches a line that is a row.
        lost: finds a number of lost rows in a line; None: the program does not tell.
        environment: added to this process's.
        is_attached: whether the program with this pid and output has attached.
    """

    def __init__(
        self,
        command: Sequence[str],
        row: str,
        lost: str | None,
        environment: dict[str, str],
        is_attached: Callable[[int, str], bool],
    ) -> None:
        self._row, self._lost = re.compile(row, re.M), lost
        self._out, self._err = Output(), Output()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._out.descriptor,
                stderr=self._err.descriptor,
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._close()
            raise KvprobeError(f"{command[0]}: {error.strerror}") from error
        self.pid = self._process.pid
        try:
            self._wait(is_attached)
        except BaseException:
            self.kill()
            raise
        self._used = cpu_seconds(self.pid)

    def stop(self) -> Traced:
        """CPU time is that from being attached to having printed all, without the way out."""
        time.sleep(SETTLE_SECONDS)
        user, system = cpu_seconds(self.pid)
        peak = peak_bytes(self.pid)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(START_SECONDS)
            out, err = self._out.text(), self._err.text()
        finally:
            self.kill()
        lost = None
        if self._lost is not None:
            lost = sum(int(n) for n in re.findall(self._lost, out + err, re.M))
        rows = len(self._row.findall(out))
        return Traced(rows, lost, user - self._used[0], system - self._used[1], peak)

    def kill(self) -> None:
        """End it at once; may be called again."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _wait(self, is_attached: Callable[[int, str], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_attached(self.pid, self._out.text()):
            if self._process.poll() is not None:
                raise KvprobeError(reason(self._out.text() + self._err.text()))
            if time.monotonic() > deadline:
                raise KvprobeError(f"not attached after {START_SECONDS:.0f} s")
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)

    def _close(self) -> None:
        self._out.close()
        self._err.close()


def reason(said: str) -> str:
    """Why a program ended, in one line: its first complaint and the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return "it ended without a word"
    telling = re.compile(r"unable|cannot|error|failed|no such", re.I)
    first = next((line for line in lines if telling.search(line)), lines[-1])
    first = first.split(". ")[0][:160]
    return first if lines[-1].startswith(first) else f"{first}; {lines[-1][:160]}"


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process and its ended children so far."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    user, system, child_user, child_system = map(int, fields[11:15])
    return (user + child_user) * TICK_SECONDS, (system + child_system) * TICK_SECONDS


def peak_bytes(pid: int) -> int:
    """Most memory a living process has had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
