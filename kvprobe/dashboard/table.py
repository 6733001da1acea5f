"""The request table: its columns, how they are sorted, and the text of each cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.digest import label, number

PART_STYLES = ("#5fafff", "#ffaf5f", "#af87ff", "#ff5f87")
"""Colours of restore parts, in the order of ``digest.RESTORE_PARTS``."""
VERDICTS = {
    "restore_won": ("restore won", "green"),
    "restore_lost": ("restore lost", "red"),
    "recompute_won": ("compute won", "green"),
    "recompute_lost": ("compute lost", "red"),
}
MOST_ROWS = 100
"""Rows that the table holds; the newest, or the first in the chosen order."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """What a cell may need besides its request."""

    now_ns: int | None = None


@dataclass(frozen=True)
class Column:
    """One column. ``order`` gives the figure to sort by, largest first; None: cannot be sorted."""

    key: str
    title: str
    width: int
    cell: Callable[[Row, Moment], Text]
    order: Callable[[Row, Moment], float | None] | None = None
    from_width: int = 0
    right: bool = True


def arrival(row: Row, _: Moment) -> float | None:
    """Time of arrival, for the newest first."""
    return number(row, "t_arrival_ns")


def ttft_or_age(row: Row, moment: Moment) -> float | None:
    """Time to first token, or how long the request has been waiting for it."""
    ttft, arrived = number(row, "ttft_ns"), number(row, "t_arrival_ns")
    if ttft is not None or arrived is None or moment.now_ns is None:
        return ttft
    return max(0, moment.now_ns - arrived)


def _age(row: Row, moment: Moment) -> Text:
    text = units.duration(ttft_or_age(row, moment))
    waiting = number(row, "ttft_ns") is None and text != units.UNKNOWN
    return Text(f"{text}…", "italic yellow") if waiting else _plain(text)


def _regret(row: Row, _: Moment) -> float | None:
    return digest.regret_ns(row)


def _field(*path: str) -> Callable[[Row, Moment], float | None]:
    return lambda row, _: number(row, *path)


def _shown(
    value: Callable[[Row, Moment], float | None], show: Callable[[float | None], str]
) -> Callable[[Row, Moment], Text]:
    return lambda row, moment: _plain(show(value(row, moment)))


def _restore(*path: str, show: Callable[[float | None], str]) -> Callable[[Row, Moment], Text]:
    """A figure of the restore; a dash where the request restored nothing."""

    def cell(row: Row, _: Moment) -> Text:
        if not row.get("restore"):
            return Text(units.DASH, "dim")
        return _plain(show(number(row, "restore", *path)))

    return cell


def _plain(text: str) -> Text:
    return Text("?", "dim") if text == units.UNKNOWN else Text(text)


def part_bar(row: Row, width: int) -> Text:
    """The parts of one restore as a bar; empty where there is none, or a part is unknown."""
    values = [number(row, "restore", key) for key, _, _ in digest.RESTORE_PARTS]
    if None in values:
        return Text()
    pairs = zip(bars.stacked(values, width), PART_STYLES, strict=True)
    return Text.assemble(*pairs)


def verdict(row: Row) -> Text:
    """The verdict in two words; still running and undecided are dim."""
    name = label(row, "verdict") or "unknown"
    if name in VERDICTS:
        return Text(*VERDICTS[name])
    return Text("running" if number(row, "ttft_ns") is None else digest.undecided(row), "dim")


def gain(row: Row) -> Text:
    """Time saved against the other choice, with its interval."""
    mid, low, high = (number(row, key) for key in ("gain_ns", "gain_low_ns", "gain_high_ns"))
    text = units.interval(mid, low, high, units.duration)
    style = VERDICTS.get(label(row, "verdict") or "", ("", ""))[1]
    return _plain(text) if text == units.UNKNOWN else Text(text, style)


def _recompute(row: Row, _: Moment) -> Text:
    return _plain(estimate_text(row))


def estimate_text(row: Row) -> str:
    """What recomputing would have cost, with its interval."""
    mid, low, high = (number(row, "recompute", key) for key in ("estimate_ns", "low_ns", "high_ns"))
    return units.interval(mid, low, high, units.duration)


def _tied(row: Row, _: Moment) -> Text:
    name = digest.attribution_class(row)
    return Text(name or units.DASH, "" if name in ("exact", "thread") else "dim")


def _stored(row: Row, _: Moment) -> float | None:
    stored = number(row, "tokens", "stored")
    return number(row, "tokens", "storage_hit") if stored is None else stored


def _name(width: int) -> Callable[[Row, Moment], Text]:
    return lambda row, _: Text(bars.shortened(label(row, "id") or "?", width))


_EXPOSED = _field("restore", "exposed_ns")
_COST = _field("recompute", "estimate_ns")
_BYTES = _field("restore", "bytes")

COLUMNS: Sequence[Column] = (
    Column("id", "request", 8, _name(8), arrival, right=False),
    Column("ttft", "TTFT", 8, _age, ttft_or_age),
    Column(
        "prompt",
        "prompt",
        7,
        _shown(_field("tokens", "prompt"), units.count),
        _field("tokens", "prompt"),
        from_width=100,
    ),
    Column("stored", "stored", 6, _shown(_stored, units.count), _stored),
    Column("bytes", "read", 8, _restore("bytes", show=units.size), _BYTES),
    Column("reads", "reads", 6, _restore("ops", show=units.count), from_width=110),
    Column("parts", "parts", 7, lambda row, _: part_bar(row, 7), right=False),
    Column("restore", "restore", 7, _restore("exposed_ns", show=units.duration), _EXPOSED),
    Column("recompute", "compute", 7, _shown(_COST, units.duration), _COST),
    Column("interval", "compute, 90 %", 20, _recompute, from_width=140),
    Column("verdict", "verdict", 12, lambda row, _: verdict(row), _regret, right=False),
    Column("gain", "gain, 90 %", 26, lambda row, _: gain(row), _regret, from_width=125),
    Column("tied", "tied", 6, _tied, right=False),
)

ORDERS: Sequence[tuple[str, str]] = (
    ("id", "newest first"),
    ("verdict", "most lost first"),
    ("ttft", "longest TTFT first"),
    ("restore", "longest restore first"),
    ("bytes", "most bytes first"),
)
"""What the sort key goes through: column, words."""


def columns_for(width: int) -> list[Column]:
    """The columns that a screen of this width has room for."""
    shown = [column for column in COLUMNS if width >= column.from_width]
    if width >= 140:  # the interval says more than the bare estimate
        shown = [column for column in shown if column.key != "recompute"]
    return shown


def ordered(rows: Sequence[Row], key: str, moment: Moment, reverse: bool = False) -> list[Row]:
    """The requests by one column, largest first (or smallest), unknown ones last."""
    column = next(column for column in COLUMNS if column.key == key)
    order = column.order or arrival
    figures = [(order(row, moment), arrival(row, moment) or 0, row) for row in rows]
    known = [item for item in figures if item[0] is not None]
    known.sort(key=lambda item: (item[0] or 0.0, item[1]), reverse=not reverse)
    rest = [item for item in figures if item[0] is None]
    rest.sort(key=lambda item: item[1], reverse=True)
    return [row for _, _, row in known + rest]


def cells(row: Row, columns: Sequence[Column], moment: Moment) -> list[Text]:
    """One line of the table."""
    found = []
    for column in columns:
        cell = column.cell(row, moment)
        cell.truncate(column.width, overflow="ellipsis")
        cell.no_wrap = True
        if column.right:
            cell.pad_left(column.width - cell.cell_len)
        found.append(cell)
    return found
