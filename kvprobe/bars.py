"""Bars of characters, for text and for screens. Each part has its own shade: no colour is needed.

All functions return plain strings of an exact width, so that callers may colour and align them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

SHADES = "█▓▒░"
"""Fills of the parts of a stacked bar, in order."""

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(
    {
        "█": "#", "▓": "=", "▒": "-", "░": ".", "▁": "_", "▂": ".", "▃": "-", "▄": "=",
        "▅": "+", "▆": "*", "▇": "%", "─": "-", "━": "=", "│": "|", "┃": "|", "├": "|", "┤": "|",
        "╶": "-", "╴": "-", "●": "o", "◆": "x", "·": ".", "\N{EN DASH}": "-", "…": "~", "→": ">",
        "µ": "u", "▲": "^", "▼": "v", "▶": ">", "⏸": "|", "≥": ">", "≤": "<", "✓": "+",
        "✗": "-", "\N{MULTIPLICATION SIGN}": "x", "\N{REPLACEMENT CHARACTER}": "?",
    }
)  # fmt: skip


def to_ascii(text: str) -> str:
    """The same text for a terminal without UTF-8; every character keeps its place."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def cells(values: Sequence[float | None], width: int) -> list[int]:
    """Cells per value, in proportion and summing to ``width``; all 0 when there is no total.

    A value above zero gets at least one cell where the width allows it: small is not nothing.
    """
    clean = [max(0.0, value or 0.0) for value in values]
    total = sum(clean)
    if total <= 0 or width <= 0:
        return [0] * len(clean)
    exact = [value / total * width for value in clean]
    found = [int(part) for part in exact]
    positive = [index for index, value in enumerate(clean) if value > 0]
    if len(positive) <= width:
        for index in positive:
            found[index] = max(1, found[index])
    by_need = sorted(positive, key=lambda index: exact[index] - found[index], reverse=True)
    while sum(found) < width:
        best = max(by_need, key=lambda index: exact[index] - found[index])
        found[best] += 1
    while sum(found) > width:
        largest = max(range(len(found)), key=lambda index: found[index] - exact[index])
        if found[largest] <= 1:
            largest = max(range(len(found)), key=lambda index: found[index])
        found[largest] -= 1
    return found


def stacked(values: Sequence[float | None], width: int) -> list[str]:
    """One filled string per value; joined they are ``width`` wide, or empty with no total."""
    return [
        SHADES[index % len(SHADES)] * length for index, length in enumerate(cells(values, width))
    ]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last ``width`` values as levels between 0 and their maximum; a gap where unknown."""
    recent = list(values)[-width:] if width > 0 else []
    top = max((value for value in recent if value is not None), default=0.0)
    marks = []
    for value in recent:
        if value is None:
            marks.append(" ")
        else:
            level = round(max(0.0, value) / top * (len(_LEVELS) - 1)) if top > 0 else 0
            marks.append(_LEVELS[level])
    return "".join(marks).rjust(max(0, width))


def on_axis(
    spans: Sequence[tuple[float | None, float | None]],
    values: Sequence[float | None],
    low: float,
    high: float,
    width: int,
) -> list[float | None]:
    """Values of spans of time in ``width`` cells of equal time from ``low`` to ``high``.

    A cell has the highest value of the span at its middle and of those whose middle it holds: no
    peak is lost, and a cell is None only where nothing is known.
    """
    found: list[float | None] = [None] * max(0, width)
    cell = (high - low) / width if width > 0 else 0.0
    if cell <= 0:
        return found
    for (start, end), value in zip(spans, values, strict=True):
        if start is None or end is None or value is None:
            continue
        at, to, middle = ((time - low) / cell for time in (start, end, (start + end) / 2))
        covered = range(max(0, math.ceil(at - 0.5)), min(width, math.ceil(to - 0.5)))
        for index in {*covered, *([math.floor(middle)] if 0 <= middle < width else [])}:
            known = found[index]
            found[index] = value if known is None else max(known, value)
    return found


def waterfall(values: Sequence[float | None], width: int) -> list[str]:
    """One line per value, each starting where the one before ended; every line ``width`` wide."""
    lengths = cells(values, width)
    ends = accumulate(lengths)
    return [
        (" " * (end - length) + "█" * length).ljust(width)
        for end, length in zip(ends, lengths, strict=True)
    ]


def position(value: float, low: float, high: float, width: int) -> int:
    """The cell of ``value`` on a linear axis from ``low`` to ``high``, clamped to the axis."""
    if high <= low or width <= 1:
        return 0
    return max(0, min(width - 1, round((value - low) / (high - low) * (width - 1))))


def progress(done: float, width: int) -> str:
    """A position bar for a share from 0 to 1."""
    filled = max(0, min(width, round(done * width)))
    return "━" * filled + "─" * (width - filled)


def shortened(name: str, width: int) -> str:
    """A name cut in its middle, where the ids of one engine are most alike."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"
