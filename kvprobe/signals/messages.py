"""Find the few lines of a log that matter, and read them."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvprobe.adapter import LogLine, News
from kvprobe.clock import Moment, WallClock
from kvprobe.signals import stamps
from kvprobe.signals.stamps import Stamp

NOT_UNDERSTOOD = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
)
"""What a reader of an adapter may raise on what it does not understand."""

_ESCAPE = re.compile(
    rb"""
    \x1b (?:
        \[ [0-?]*+ [\ -/]*+ [@-~]                      # colours, cursor
      | \] [^\x07\x1b\n]*+ (?: \x07 | \x1b\\ )         # hyperlinks, titles
      | [PX^_] [^\x1b\n]*+ \x1b\\                      # strings for the terminal
      | [\ -/]++ [0-~]                                 # character sets
      | [0-Z\\-~]
    )?+
    """,
    re.VERBOSE,
)
"""Escape sequences of ECMA-48; of one that is broken only how it begins."""
_INDENTED = re.compile(rb"\n {8,}(?=[^ \n])")
_INDENT = b"\n" + 8 * b" "
_SOURCE_COLUMN = re.compile(rb" {2,}[\w./-]{1,60}:\d+ *\Z")
_COLUMN_BYTES = 80


def plain(block: bytes) -> bytes:
    r"""Lines without escape sequences, each ended by ``\n``; indented lines end those above.

    A rich console indents what it wraps at least as far as its column of levels is wide, and may
    have put the place in the source behind the first line.
    """
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\\u001b" in block:  # in lines that are JSON
        block = block.replace(b"\\u001b", b"\x1b")
    if b"\x1b" in block:
        block = _ESCAPE.sub(b"", block)
    return _unwrapped(block) if _INDENT in block else block


def _unwrapped(block: bytes) -> bytes:
    parts = []
    place = 0
    for indented in _INDENTED.finditer(block):
        end = indented.start()
        column = _SOURCE_COLUMN.search(block, max(place, end - _COLUMN_BYTES), end)
        parts.append(block[place : column.start() if column else end].rstrip(b" "))
        place = indented.end()
    return b" ".join([*parts, block[place:]])


class LineClock:
    """Tells when lines were written that are read at ``now_ns`` (CLOCK_MONOTONIC)."""

    def __init__(self, clock: WallClock, now_ns: int) -> None:
        self._clock = clock
        self._now_ns = now_ns
        self._now_wall_ns = time.time_ns()
        self._received: Stamp | None = None
        self._received_moment: Moment | None = None

    def receive(self, stamp: Stamp | None, moment: Moment | None = None) -> None:
        """The next line was received then by who keeps it; ``moment`` is the same, if known."""
        self._received, self._received_moment = stamp, moment

    def written(self, text: str, start: int, end: int) -> Moment | None:
        """When the message at ``text[start:end]`` was written, and that is not after now."""
        stamp = stamps.written(text, start, end, self._now_wall_ns, self._received)
        if stamp is None:
            return None
        if stamp is self._received and self._received_moment is not None:
            return self._received_moment
        earliest_ns, latest_ns = self._clock.moment(*stamp)
        if earliest_ns <= self._now_ns:
            latest_ns = min(latest_ns, self._now_ns)
        return Moment(earliest_ns, latest_ns)


class Read(NamedTuple):
    """What was read of one text: ``messages`` so many, the last of which ends at ``end``."""

    news: Sequence[News]
    messages: int
    end: int


class MessageReader:
    """Reads the kinds of lines that adapters declare.

    Raises:
        ValueError: a kind of line has no mark.
    """

    def __init__(self, lines: Sequence[LogLine]) -> None:
        self._lines = lines
        self._places: dict[bytes, list[int]] = defaultdict(list)
        for place, line in enumerate(lines):
            if not line.mark:
                raise ValueError(f"{line.name} has no mark")
            for written in (line.mark, json.dumps(line.mark, ensure_ascii=False)[1:-1]):
                places = self._places[written.encode()]
                places += [place] if place not in places else []

    def hits(self, block: bytes) -> dict[int, set[int]]:
        """Which kinds of line the marks in ``block`` are of, by the place where the line begins.

        A search for each mark is faster than one for all of them: a regular expression looks at
        every byte, these do not.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for mark, places in self._places.items():
            place = block.find(mark)
            while place >= 0:
                found[block.rfind(b"\n", 0, place) + 1].update(places)
                end = block.find(b"\n", place)
                place = block.find(mark, end) if end >= 0 else -1
        return found

    def kinds(self, text: str) -> set[int]:
        """The kinds of line whose marks are in ``text``."""
        return {place for place, line in enumerate(self._lines) if line.mark in text}

    def read(self, text: str, kinds: set[int], when: LineClock) -> Read | None:
        """All messages in ``text``: interleaved writers put several on a line. None: there is none.

        Args:
            text: one line.
            kinds: the kinds of line that are tried, in the order in which they are declared; no
                message is read twice.
            when: tells when the line was written.
        """
        news: list[News] = []
        taken: list[tuple[int, int]] = []
        for kind in sorted(kinds):
            line = self._lines[kind]
            for match in line.pattern.finditer(text):
                start, end = match.span()
                if any(start < other_end and other < end for other, other_end in taken):
                    continue
                try:
                    said = line.read(match, when.written(text, start, end))
                except NOT_UNDERSTOOD:
                    continue
                taken.append((start, end))
                if said is not None:
                    news.append(said)
        return Read(news, len(taken), max(end for _, end in taken)) if taken else None
