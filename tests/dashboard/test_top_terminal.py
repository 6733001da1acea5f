"""``kvprobe top`` as a shell starts it: on a pseudo terminal, and without one."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvprobe import cli
from tests.reports.recorded import write_capture


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_capture(tmp_path_factory.mktemp("top") / "node.kvcap")


class Terminal:
    """A process on a pseudo terminal of 80x24 and what it has written so far."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvprobe", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self.written = ""

    def read(self) -> str:
        """Everything written up to now, without escapes."""
        try:
            while data := os.read(self.master, 65_536):
                self.written += data.decode("utf-8", "replace")
        except (BlockingIOError, OSError):
            pass
        return re.sub(r"\x1b(\[[0-9;?<>=]*[a-zA-Z]|\].*?\x07|[()][A-B0])", "", self.written)

    def until(self, text: str, seconds: float = 60) -> None:
        """Wait until the text is on the screen."""
        deadline = time.monotonic() + seconds
        while text not in self.read():
            assert self.process.poll() is None, self.read()
            assert time.monotonic() < deadline, self.read()[-2000:]
            time.sleep(0.05)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self, seconds: float = 30) -> int:
        """Exit code, with the terminal read to the end."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.02)
        self.read()
        return self.process.returncode


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    found = Terminal(*words)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait()
        os.close(found.master)


@pytest.mark.parametrize("keys", ["q", "\x03", "?\x03"])
def test_a_replay_on_a_terminal(node: Path, keys: str) -> None:
    with terminal("top", "--replay", str(node), "--speed", "64") as screen:
        screen.until("r210")
        screen.until("serial_restore")
        screen.press(keys)
        assert screen.ended() == 0
        assert "Traceback" not in screen.read()
        assert "\x1b[?1049l" in screen.written, "the terminal is given back"


def test_a_foreign_file_is_told_before_the_screen_opens(tmp_path: Path) -> None:
    path = tmp_path / "foreign.kvcap"
    path.write_bytes(b"\x7fELF" * 17)
    with terminal("top", "--replay", str(path)) as screen:
        assert screen.ended() == 2
        assert "is not a kvprobe capture" in screen.read()
        assert "\x1b[?1049h" not in screen.written


def test_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--replay", "some.kvcap"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "terminal" in lines[0]
    assert "kvprobe report some.kvcap" in lines[1]


@pytest.mark.parametrize(
    "words", [["--speed", "2"], ["--replay", "f", "--speed", "0"], ["--window", "no"]]
)
def test_options_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
