"""How the text report is set for where it goes: width, colour, characters."""

from __future__ import annotations

import os
import shutil
from typing import Any, TextIO

_PLAIN_WIDTH = 100


def page_options(stream: TextIO | None, width: int | None = None) -> dict[str, Any]:
    """Options of the text report for a stream, or for a file (None).

    Colour only on a terminal, and not where NO_COLOR is set or TERM is dumb; ASCII only where the
    stream's encoding has no more. ``width`` overrides the terminal's.
    """
    terminal = stream is not None and stream.isatty()
    if width is None:
        width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns if terminal else _PLAIN_WIDTH
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    encoding = "utf-8" if stream is None else stream.encoding
    return {
        "width": width,
        "color": terminal and not plain,
        "ascii_only": not _can_draw(encoding),
    }


def _can_draw(encoding: str | None) -> bool:
    try:
        "█░├●µ→\N{EN DASH}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
