"""Start a command so that it is known, and traced, before its first instruction."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from kvprobe.errors import KvprobeError

_STOP_SECONDS = 10.0
_CANNOT_RUN = 127


class Child:
    """A process that waits until ``release`` and then becomes the command.

    Its standard output is kvprobe's standard error: kvprobe's own carries the result. If kvprobe
    dies before ``release``, so does the child.

    Args:
        command: program and arguments; looked up in PATH.

    Raises:
        OSError: no process can be made.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.status: int | None = None
        gate, self._gate = os.pipe()
        self._failure, failure = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            self._become(gate, failure)
        os.close(gate)
        os.close(failure)

    def release(self) -> None:
        """Let the command run; returns when it does.

        Raises:
            KvprobeError: it cannot be run.
        """
        os.write(self._gate, b"\n")
        os.close(self._gate)
        reason = os.read(self._failure, 16)
        os.close(self._failure)
        if reason:
            self.stop()
            raise KvprobeError(
                f"cannot run {self.command[0]}: {os.strerror(int(reason))}",
                "the command comes after --, as in: kvprobe capture -- python3 server.py",
            )

    def ended(self) -> bool:
        """Whether the command has ended; ``status`` is then its exit status, -N for signal N."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def stop(self) -> None:
        """End the command if it still runs: asked first, killed after ten seconds."""
        for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
            if self.ended():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            until = time.monotonic() + seconds
            while not self.ended() and time.monotonic() < until:
                time.sleep(0.02)

    def _become(self, gate: int, failure: int) -> None:
        """In the new process: wait, then turn into the command. Never returns."""
        try:
            if os.read(gate, 1):
                # Python ignores SIGPIPE; what it starts expects the default.
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.dup2(2, 1)
                os.execvp(self.command[0], self.command)
        except OSError as error:
            os.write(failure, str(error.errno).encode())
        finally:
            os._exit(_CANNOT_RUN)
