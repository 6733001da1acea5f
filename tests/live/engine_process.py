"""Processes of an engine under test: started on loopback, waited for, always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ENVIRONMENTS = Path(__file__).parents[2] / ".cache" / "engines"
_STOP_SECONDS = 30.0


class EngineMissingError(Exception):
    """An engine is not installed; the message is one line and says what to do."""


class EngineFailedError(Exception):
    """An engine did not start or did not answer; the message ends with its last words."""


def python_of(name: str) -> str:
    """The interpreter of an installed engine's environment.

    Raises:
        EngineMissingError: it is not installed.
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    if not (ENVIRONMENTS / name / ".installed").is_file() or not python.exists():
        raise EngineMissingError(f"{name} is not installed here: ./setup.sh engines says why")
    return str(python)


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def answers(url: str) -> bool:
    """Whether a GET of ``url`` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return 200 <= int(answer.status) < 300
    except (OSError, urllib.error.URLError):
        return False


class EngineProcess:
    """One process and all that it starts; a context that ends them.

    It dies with its parent too, so that a killed test run leaves nothing.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self._process.pid

    def members(self) -> list[int]:
        """It and its descendants that are alive."""
        found, asked = [self.pid], [self.pid]
        while asked:
            children = _children(asked.pop())
            found += children
            asked += children
        return found

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until it is ready.

        Raises:
            EngineFailedError: it ended, or took longer.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise EngineFailedError(f"{self.name} ended at once: {self.last_words()}")
            if time.monotonic() > deadline:
                raise EngineFailedError(
                    f"{self.name}: not ready in {seconds:.0f} s; {self.last_words()}"
                )
            time.sleep(0.1)

    def last_words(self) -> str:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - 2000, 0))
            return file.read().decode("utf-8", "replace").strip()

    def stop(self) -> None:
        """End it and everything in its group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.stop()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found
