"""What a stream can show: width, signs, colour. Plain ASCII where its encoding has no more."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TextIO

_SIGNS = {
    "good": "\N{CHECK MARK}",
    "less": "!",
    "bad": "\N{BALLOT X}",
    "unknown": "?",
    "unused": "-",
}
_ASCII_SIGNS = {"good": "+", "less": "!", "bad": "x", "unknown": "?", "unused": "-"}
_COLOURS = {"good": "32", "less": "33", "bad": "31", "unknown": "36", "unused": "2"}
_PLAIN_WIDTH = 100
_WIDTHS = (40, 120)
"""Lines are never set narrower or wider: neither is readable."""


@dataclass(frozen=True)
class Style:
    """How to write for one stream."""

    width: int
    ascii_only: bool
    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """The style that suits a stream; colour on a terminal unless NO_COLOR is set."""
        terminal = stream.isatty()
        columns = shutil.get_terminal_size((80, 0)).columns if terminal else _PLAIN_WIDTH
        dumb = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(
            min(max(columns, _WIDTHS[0]), _WIDTHS[1]),
            not _can_write(stream, "".join(_SIGNS.values())),
            terminal and not dumb,
        )

    def sign(self, meaning: str) -> str:
        """A sign for ``good``, ``less``, ``bad``, ``unknown`` or ``unused``."""
        sign = (_ASCII_SIGNS if self.ascii_only else _SIGNS)[meaning]
        return self._painted(sign, _COLOURS[meaning])

    def bold(self, text: str) -> str:
        """Text that stands out where the stream can."""
        return self._painted(text, "1")

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
