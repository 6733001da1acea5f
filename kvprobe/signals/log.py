"""What an engine writes into its log file."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Sequence

from kvprobe.adapter import LogLine, News
from kvprobe.clock import WallClock
from kvprobe.errors import KvprobeError
from kvprobe.signals import FeedBatch, stamps
from kvprobe.signals.lines import LineFollower
from kvprobe.signals.messages import NOT_UNDERSTOOD, LineClock, MessageReader, Read, plain

MOST_BEHIND_BYTES = 64 << 20
"""How much of an old log is read, and how far a log may run ahead before some is skipped."""
_WRAPPED_LINES = 3
"""A message is in one line or in so many more."""
_HEAD_CHARS = 200
"""A line that begins a message has its stamp among so many characters."""
_DOCKER = '{"log":'


class LogFeed:
    """Satisfies ``signals.Feed``: the lines of a log file that an adapter declares.

    ``understood`` counts messages, ``ignored`` lines with the mark of a message that are none,
    ``lost`` lines that are too long to be kept.

    Args:
        path: the log; it may come later.
        lines: what to look for.
        now: CLOCK_MONOTONIC in nanoseconds.

    Raises:
        KvprobeError: ``path`` is no file, or cannot be read.
    """

    last_word = False

    def __init__(
        self, path: str, lines: Sequence[LogLine], now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        _check(path)
        self.name = f"log:{path}"
        self._file = LineFollower(path, ends=b"\r\n", most_behind_bytes=MOST_BEHIND_BYTES)
        self._reader = MessageReader(lines)
        self._now = now
        self._held = b""
        self._news: list[News] = []
        self._understood = self._ignored = 0

    def poll(self, clock: WallClock) -> FeedBatch:
        """Return what is new; reads some megabytes at most."""
        for block in self._file.blocks():
            self._take(block, clock, last=False)
        return self._batch()

    def close(self, clock: WallClock) -> FeedBatch:
        """Return the rest, a last line without an end included."""
        for block in self._file.rest():
            self._take(block, clock, last=False)
        self._take(b"", clock, last=True)
        skipped = self._file.skipped_bytes >> 20
        most = MOST_BEHIND_BYTES >> 20
        note = f"{skipped} MiB of the log were not read: older than its last {most} MiB"
        return self._batch([note] if skipped else [])

    def _batch(self, notes: Sequence[str] = ()) -> FeedBatch:
        batch = FeedBatch(
            self._news,
            understood=self._understood,
            ignored=self._ignored,
            lost=self._file.take_skipped(),
            notes=notes,
        )
        self._news, self._understood, self._ignored = [], 0, 0
        return batch

    def _take(self, block: bytes, clock: WallClock, last: bool) -> None:
        """Read whole lines; a last one that says nothing yet waits for what may be its rest."""
        block = plain(self._held + block)
        held = len(block) if last else _line_before(block, len(block))
        when = LineClock(clock, self._now())
        done = 0
        for start, kinds in sorted(self._reader.hits(block).items()):
            if start < done:
                continue  # it belongs to the message above
            read, done = self._message(block, done, start, kinds, when)
            if read is not None:
                self._news += read.news
                self._understood += read.messages
                held = max(held, done)
            elif done == len(block) and not last:
                held = min(held, start)
                break
            else:
                self._ignored += 1
        self._held = block[held:]

    def _message(
        self, block: bytes, done: int, start: int, kinds: set[int], when: LineClock
    ) -> tuple[Read | None, int]:
        """What the line at ``start`` says, alone or with its neighbours; where those end.

        Lines before ``done`` belong to other messages.
        """
        line, end = _line(block, start)
        text, received = _unpacked(line)
        when.receive(received)
        read = self._reader.read(text, kinds, when)
        if read is not None:
            return (None if _cuts_number(text, read.end, block, end) else read), end
        parts, place = [*_above(block, done, start, text), text], end
        for below in range(_WRAPPED_LINES + 1):
            if below:
                if place == len(block):
                    return None, place  # more of it may come
                line, place = _line(block, place)
                if not _continues(line):
                    break
                parts.append(line)
            for joint in (" ", "") if len(parts) > 1 else ():  # wrapped between words, or just cut
                read = self._reader.read(joint.join(parts), kinds, when)
                if read is not None:
                    return read, place
        return None, end


def _above(block: bytes, done: int, start: int, text: str) -> list[str]:
    """The lines that the one at ``start`` may go on from."""
    lines: list[str] = []
    while start > done and len(lines) < _WRAPPED_LINES and _continues(text):
        start = _line_before(block, start)
        text = _line(block, start)[0]
        if not text:
            break
        lines.insert(0, text)
    return lines


def _line(block: bytes, start: int) -> tuple[str, int]:
    """The line at ``start``, and where the next one begins."""
    end = block.find(b"\n", start)
    return block[start:end].decode("utf-8", "replace"), end + 1


def _line_before(block: bytes, end: int) -> int:
    """Where the line begins that ends at ``end``."""
    return block.rfind(b"\n", 0, max(end - 1, 0)) + 1


def _cuts_number(text: str, end_of_message: int, block: bytes, end_of_line: int) -> bool:
    """Whether the last number of a message may go on in the line below."""
    return (
        end_of_message == len(text)
        and text[-1:].isdigit()
        and block[end_of_line : end_of_line + 1].isdigit()
        and _continues(_line(block, end_of_line)[0])
    )


def _continues(line: str) -> bool:
    """Whether a line may be the rest of the one above: it has no stamp of its own."""
    return bool(line) and not line.startswith("{") and not stamps.stamped(line[:_HEAD_CHARS])


def _unpacked(line: str) -> tuple[str, stamps.Stamp | None]:
    """The text of a line, and when a container runtime says that it received it."""
    if line.startswith(_DOCKER):
        try:
            packed = json.loads(line)
            return packed["log"].rstrip("\n"), stamps.iso(packed["time"])
        except (RecursionError, *NOT_UNDERSTOOD):
            pass
    return line, None


def _check(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise KvprobeError(f"cannot read {path}: {error.strerror}", "run as root") from None
    if not stat.S_ISREG(mode):
        raise KvprobeError(
            f"{path} is not a file",
            "send the engine's output into a file, or name its unit: journal:UNIT",
        )
    if not os.access(path, os.R_OK):
        raise KvprobeError(f"no right to read {path}", "run as root")
