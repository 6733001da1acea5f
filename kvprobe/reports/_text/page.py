"""The page that the sections write on: width, tables, paragraphs, and the final string."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvprobe import bars

NARROWEST, WIDEST = 80, 200
PROSE = 110
"""Widest line of running text; tables may be wider."""

PART_STYLES = ("cyan", "yellow", "magenta", "red")
"""Colours of restore parts, in the order of ``digest.RESTORE_PARTS``."""
VERDICT_STYLES = {
    "restore_won": "green",
    "recompute_won": "green",
    "restore_lost": "red",
    "recompute_lost": "red",
}
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}

_RULE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")

Cell = str | Text


@dataclass(frozen=True)
class Page:
    """How wide the text may be, and what it is asked to hold."""

    width: int = 100
    source: str | None = None
    requests: str = "10"

    def bar_width(self, beside: int, least: int = 10, most: int = 60) -> int:
        """Cells left for a bar beside ``beside`` cells of other columns."""
        return max(least, min(most, self.width - beside))


@dataclass(frozen=True)
class Column:
    """One column of a table; it appears where the page is at least ``from_width`` wide."""

    title: str
    value: Callable[[Any], Cell]
    justify: Literal["left", "right"] = "right"
    from_width: int = 0
    most: int | None = None
    """Widest cell; longer text ends in an ellipsis."""
    wraps: bool = False
    """Whether this column gives way where the page is too narrow for all."""


def table(page: Page, columns: Sequence[Column], items: Iterable[Any]) -> RenderableType:
    """A plain table of ``items``, one row each."""
    shown = [column for column in columns if page.width >= column.from_width]
    grid = Table(
        box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column in shown:
        grid.add_column(
            column.title,
            justify=column.justify,
            max_width=column.most,
            overflow="fold" if column.wraps else "ellipsis",
            no_wrap=not column.wraps,
        )
    for item in items:
        grid.add_row(*(column.value(item) for column in shown))
    return Padding(grid, (0, 0, 0, 1))


def heading(title: str, note: str = "") -> RenderableType:
    """A section's title with what it is about or how many stand behind it."""
    line = Text.assemble(("\n" + title, "bold underline"))
    if note:
        line.append(f"  {note}")
    return line


def paragraph(text: Cell, indent: int = 1) -> RenderableType:
    """Wrapped text."""
    return Padding(Constrain(_kept_together(text), PROSE), (0, 0, 0, indent))


def labelled(pairs: Iterable[tuple[str, Cell]], indent: int = 1, gap: int = 2) -> RenderableType:
    """``name  text`` lines whose text wraps under itself; ``gap`` cells between the two."""
    grid = Table.grid(padding=(0, gap, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in pairs:
        grid.add_row(name, _kept_together(text))
    return Padding(Constrain(grid, PROSE), (0, 0, 0, indent))


_GLUE = "\N{BRAILLE PATTERN BLANK}"
"""Stands for a space where a line must not break; rich takes every real space as a chance."""
_TOGETHER = re.compile(
    r"(?<=\d) (?=(?:ns|µs|ms|s|min|h|B|[KMGT]iB(?:/s)?|B/s|%|tokens|requests)\b|%)"
)


def _kept_together(text: Cell) -> Text:
    """The text with numbers glued to their units."""
    if isinstance(text, str):
        return Text(_TOGETHER.sub(_GLUE, text))
    glued = Text(_TOGETHER.sub(_GLUE, text.plain), text.style)
    glued.spans = list(text.spans)
    return glued


def print_page(
    sections: Iterable[RenderableType], page: Page, *, color: bool, ascii_only: bool
) -> str:
    """The sections as one string that ends in one line break, without trailing blanks."""
    console = Console(
        file=StringIO(),
        width=page.width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        record=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(Group(*sections))
    lines = captured.get().replace(_GLUE, " ").splitlines()
    text = "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"
    return bars.to_ascii(text) if ascii_only else text
