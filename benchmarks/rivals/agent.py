"""A tracer in Python, in a process of its own that tells how it did when it is asked to end.

The child prints ``ready`` when it is attached, works until its standard input is closed, and
prints one line of JSON: ``rows``, ``lost``, ``more``. ``serve`` is the child's half.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals import START_SECONDS, Output, Traced, peak_bytes, reason
from kvprobe.errors import KvprobeError

_CHECKOUT = Path(__file__).parents[2]


class Agent:
    """The parent's half: start a module of this package and speak to it.

    Raises:
        KvprobeError: it ends before it is attached.
    """

    def __init__(self, module: str, arguments: Sequence[object]) -> None:
        self._err = Output()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err.descriptor,
            text=True,
            cwd=_CHECKOUT,
        )
        self.pid = self._process.pid
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> Traced:
        """Close its input, take its answer."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            answer = self._process.stdout.read()
            said: dict[str, Any] = json.loads(answer) if answer else {}
        finally:
            error = self._err.text()
            self.kill()
        if not said:
            raise KvprobeError(reason(error))
        return Traced(
            said["rows"],
            said["lost"],
            said["user_seconds"],
            said["system_seconds"],
            said["peak_bytes"],
            said["more"],
        )

    def kill(self) -> None:
        """End it at once; may be called again."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._err.close()

    def _wait(self) -> None:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        if not ready:
            raise KvprobeError(f"not attached after {START_SECONDS:.0f} s")
        if self._process.stdout.readline() != "ready\n":
            raise KvprobeError(reason(self._err.text()))


def serve(work: Callable[[], float], finish: Callable[[], dict[str, Any]]) -> None:
    """The child's half.

    Args:
        work: deliver what there is; returns the seconds to wait before the next time.
        finish: deliver the rest; returns ``rows``, ``lost``, ``more``.
    """
    began = resource.getrusage(resource.RUSAGE_SELF)
    print("ready", flush=True)
    pause = 0.0
    while not select.select([0], [], [], pause)[0]:
        pause = work()
    said = finish()
    used = resource.getrusage(resource.RUSAGE_SELF)
    said |= {
        "user_seconds": used.ru_utime - began.ru_utime,
        "system_seconds": used.ru_stime - began.ru_stime,
        "peak_bytes": peak_bytes(os.getpid()),
    }
    print(json.dumps(said), flush=True)
