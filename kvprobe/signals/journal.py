"""What a unit of systemd writes into the journal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvprobe.adapter import LogLine, News
from kvprobe.clock import Moment, WallClock
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.signals import FeedBatch
from kvprobe.signals.lines import READ_BYTES_A_POLL, LineAssembler
from kvprobe.signals.messages import LineClock, MessageReader, plain
from kvprobe.signals.stamps import Stamp

OLD_LINES = 10_000
"""So many lines from before are read."""
_FIELDS = "MESSAGE,_SOURCE_MONOTONIC_TIMESTAMP,_BOOT_ID"
_BYTES = re.compile(rb'"MESSAGE" ?: ?\[')
"""Text that is not plain, such as colours, comes as numbers."""
_US = 1000
_READ_BYTES = 1 << 20
_PATIENCE_SECONDS = 10
_QUIET_SECONDS = 0.1
_LAST_SECONDS = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class JournalFeed:
    """Satisfies ``signals.Feed``: the messages of a unit that an adapter declares.

    journald stamps messages as it receives them, by CLOCK_MONOTONIC. The line's own stamp counts
    instead where the two do not agree. A message that a console has wrapped is several entries,
    and is not put together.

    Args:
        unit: as ``systemctl`` calls it.
        lines: what to look for.
        now: CLOCK_MONOTONIC in nanoseconds.

    Raises:
        KvprobeError: there is no ``journalctl``, it may not read, or nothing knows the unit.
    """

    last_word = False

    def __init__(
        self, unit: str, lines: Sequence[LogLine], now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = f"journal:{unit}"
        self._reader = MessageReader(lines)
        self._now = now
        self._assembler = LineAssembler()
        self._boot = _BOOT.read_text(encoding="ascii").strip().replace("-", "")
        self._news: list[News] = []
        self._understood = self._ignored = 0
        self._ended = False
        _check(unit)
        self._process = subprocess.Popen(
            [
                "journalctl",
                "--follow",
                "--all",
                "--output=json",
                f"--output-fields={_FIELDS}",
                f"--lines={OLD_LINES}",
                f"--unit={unit}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        with suppress(OSError):  # what journalctl may be ahead of the next poll
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _READ_BYTES)

    def poll(self, clock: WallClock) -> FeedBatch:
        """Return what is new; reads some megabytes at most."""
        self._read(clock)
        return self._batch()

    def close(self, clock: WallClock) -> FeedBatch:
        """Stop, and return the rest: what arrives until it is quiet, for a second at most."""
        deadline = time.monotonic() + _LAST_SECONDS
        while not self._ended and time.monotonic() < deadline:
            if not select.select([self._pipe], [], [], _QUIET_SECONDS)[0]:
                break
            self._read(clock)
        _end(self._process)
        self._pipe.close()
        note = "journalctl ended before, and nothing was heard from then on"
        return self._batch([note] if self._ended else [])

    def _batch(self, notes: Sequence[str] = ()) -> FeedBatch:
        batch = FeedBatch(
            self._news,
            understood=self._understood,
            ignored=self._ignored,
            lost=self._assembler.take_skipped(),
            notes=notes,
        )
        self._news, self._understood, self._ignored = [], 0, 0
        return batch

    def _read(self, clock: WallClock) -> None:
        left = READ_BYTES_A_POLL
        while left > 0 and not self._ended:
            try:
                data = os.read(self._pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            self._ended = not data
            left -= len(data)
            self._take(self._assembler.add(data), LineClock(clock, self._now()))

    def _take(self, block: bytes, when: LineClock) -> None:
        starts = set(self._reader.hits(block))
        starts |= {block.rfind(b"\n", 0, m.start()) + 1 for m in _BYTES.finditer(block)}
        for start in sorted(starts):
            self._entry(block[start : block.find(b"\n", start)], when)

    def _entry(self, line: bytes, when: LineClock) -> None:
        try:
            entry = json.loads(line)
            message = entry["MESSAGE"]
            raw = bytes(message) if isinstance(message, list) else message.encode()
            stamp = Stamp(int(entry["__REALTIME_TIMESTAMP"]) * _US, _US)
            when.receive(stamp, self._moment(entry))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            self._ignored += 1
            return
        text = plain(raw).decode("utf-8", "replace")
        kinds = self._reader.kinds(text)
        read = self._reader.read(text, kinds, when) if kinds else None
        if read is not None:
            self._news += read.news
            self._understood += read.messages
        elif kinds:
            self._ignored += 1

    def _moment(self, entry: Mapping[str, Any]) -> Moment | None:
        """When the entry came, if that was since this machine was started."""
        if entry.get("_BOOT_ID") != self._boot:
            return None
        since_boot = entry.get("_SOURCE_MONOTONIC_TIMESTAMP", entry["__MONOTONIC_TIMESTAMP"])
        earliest_ns = int(since_boot) * _US
        return Moment(earliest_ns, earliest_ns + _US - 1)


def _check(unit: str) -> None:
    """Whether the journal can be read and there is such a unit."""
    if shutil.which("journalctl") is None:
        raise KvprobeError(
            "no journalctl on this machine", "name a log file: log:FILE", ExitCode.UNSUPPORTED
        )
    found = _output("journalctl", "--quiet", "--output=json", "--lines=1", f"--unit={unit}")
    if found.returncode:
        said = (found.stderr.strip().splitlines() or [f"it ended with {found.returncode}"])[0]
        raise KvprobeError(
            f"journalctl cannot read the journal: {said.rstrip('.')}",
            "run as root, or as a member of the group systemd-journal",
        )
    if not found.stdout.strip() and not _is_loaded(unit):
        raise KvprobeError(
            f"nothing is known of a unit {unit}", "systemctl list-units --type=service shows them"
        )


def _is_loaded(unit: str) -> bool:
    """Whether there is such a unit, though it has never said anything."""
    if shutil.which("systemctl") is None:
        return False
    found = _output("systemctl", "show", "--property=LoadState", "--value", "--", unit)
    return found.returncode == 0 and found.stdout.strip() not in ("", "not-found")


def _output(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KvprobeError(
            f"{command[0]} does not answer", f"try yourself: {' '.join(command)}"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS if number == signal.SIGKILL else _LAST_SECONDS)
            return
