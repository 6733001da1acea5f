"""``kvprobe capture`` as a person runs it, around whatever the test does meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvprobe.capture.manifest import Manifest
from kvprobe.capture.reader import open_capture
from kvprobe.correlator import Ledger, correlate
from kvprobe.model import Frame

_MOST_SECONDS = 900
_READY_SECONDS = 90.0
_PACK_SECONDS = 120.0


@contextmanager
def capturing(out: Path, *options: str | Path) -> Iterator[None]:
    """Record while the context lasts, with these options of ``kvprobe capture``.

    What it prints is beside ``out`` under ``.said`` (stderr) and ``.txt`` (the report).
    """
    command = [sys.executable, "-m", *capture_words(out, *options)]
    said = out.with_suffix(".said")
    with said.open("wb") as errors, out.with_suffix(".txt").open("wb") as report:
        process = subprocess.Popen(command, stdout=report, stderr=errors)
        try:
            _wait_until_recording(process, said)
            yield
            process.send_signal(signal.SIGINT)
            code = process.wait(_PACK_SECONDS)
            if code not in (0, 1):
                raise AssertionError(f"capture ended with {code}: {said.read_text()[-2000:]}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def capture_words(out: Path, *options: str | Path) -> list[str]:
    """The command; it records until somebody ends it."""
    words = ["kvprobe", "capture", "-o", str(out), "--force", "-d", str(_MOST_SECONDS)]
    return words + [str(option) for option in options]


def _wait_until_recording(process: subprocess.Popen[bytes], said: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while b"recording: " not in said.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"capture does not record: {said.read_text()[-2000:]}")
        time.sleep(0.1)


@dataclass(frozen=True)
class Seen:
    """What a capture holds."""

    manifest: Manifest
    lookups: Frame
    ledger: Ledger


def seen(out: Path) -> Seen:
    """Open a capture and join it."""
    with open_capture(out) as capture:
        return Seen(capture.manifest, capture.frame("lookups"), correlate(capture))


def signal_options(places: Sequence[str]) -> list[str]:
    """Options that name where the engines are heard."""
    return [word for place in places for word in ("--signal", place)]
