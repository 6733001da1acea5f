"""Restoring against recomputing over the prefix length, and where they cross."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprobe import bars, units
from kvprobe.digest import Document, label, number, numbers, pick, rows
from kvprobe.reports._text.page import Column, Page, heading, labelled, paragraph, table

_MOST_ROWS = 12
_WAYS = (("restore", "●", "cyan"), ("recompute", "◆", "yellow"))


def break_even(document: Document, page: Page) -> Iterator[RenderableType]:
    """The curve as a table, with both intervals drawn where the page is wide enough."""
    tokens, low, high = (
        number(document, "break_even", key) for key in ("tokens", "tokens_low", "tokens_high")
    )
    n = number(document, "break_even", "n")
    curve = rows(document, "break_even", "curve")
    at = ""
    if tokens is not None:
        at = f"at {units.interval(tokens, low, high, units.count)} tokens, 90 % interval, "
        at += f"n={units.count(n)}"
    yield heading("Break-even", at or "not inside what was measured")
    if curve:
        columns = [
            Column("tokens", lambda row: units.count(number(row, "tokens"))),
            Column("restore", lambda row: _interval(row, "restore")),
            Column("recompute", lambda row: _interval(row, "recompute")),
            Column("cheaper", _cheaper, "left"),
        ]
        plot = _plot_column(curve, page)
        yield table(page, columns + ([plot] if plot else []), _thinned(curve))
        if plot and page.width >= plot.from_width:
            yield paragraph("● restore  ◆ recompute  ├─┤ 90 % interval; time runs right, log scale")
    else:
        yield paragraph("No curve: not enough requests restored and recomputed in this window.")
    pairs = list(_model(pick(document, "break_even")))
    if pairs:
        yield labelled(pairs)


def _thinned(curve: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ``_MOST_ROWS`` points, evenly chosen, the first and the last among them."""
    if len(curve) <= _MOST_ROWS:
        return curve
    step = (len(curve) - 1) / (_MOST_ROWS - 1)
    return [curve[round(index * step)] for index in range(_MOST_ROWS)]


def _interval(row: Any, way: str) -> str:
    mid, low, high = (number(row, f"{way}{end}_ns") for end in ("", "_low", "_high"))
    return units.interval(mid, low, high, units.duration)


def _cheaper(row: Any) -> Text:
    """The cheaper way, where the intervals do not overlap."""
    ends = [(number(row, f"{way}_low_ns"), number(row, f"{way}_high_ns")) for way, _, _ in _WAYS]
    (restore_low, restore_high), (recompute_low, recompute_high) = ends
    if None in (restore_low, restore_high, recompute_low, recompute_high):
        return Text(units.UNKNOWN)
    assert restore_low is not None and restore_high is not None
    assert recompute_low is not None and recompute_high is not None
    if restore_high < recompute_low:
        return Text("restore", "green")
    return Text("recompute", "yellow") if recompute_high < restore_low else Text("open")


def _plot_column(curve: list[Mapping[str, Any]], page: Page) -> Column | None:
    values = [
        value
        for way, _, _ in _WAYS
        for end in ("_low", "", "_high")
        for value in numbers(curve, f"{way}{end}_ns")
        if value > 0
    ]
    if not values:
        return None
    least, most = math.log(min(values)), math.log(max(values))
    width = page.bar_width(78)

    def cell(value: float | None) -> int | None:
        if value is None or value <= 0:
            return None
        return bars.position(math.log(value), least, most, width)

    def draw(row: Any) -> Text:
        line = [(" ", "")] * width
        for way, mark, style in _WAYS:
            low, mid, high = (cell(number(row, f"{way}{end}_ns")) for end in ("_low", "", "_high"))
            if low is not None and high is not None and low < high:
                for index in range(low, high + 1):
                    line[index] = ("├" if index == low else "┤" if index == high else "─", style)
            if mid is not None:
                line[mid] = (mark, style)
        return Text.assemble(*line)

    return Column("", draw, "left", from_width=100)


def _model(found: Any) -> Iterator[tuple[str, str]]:
    """The fitted models in words."""
    model = pick(found, "model")
    a, b, c = _coefficients(model, "recompute_coefficients_s", 3)
    if a is not None and b is not None and c is not None:
        text = (
            f"prefill of n new tokens after a context of m: {units.duration(a * 1e9)} + "
            f"{units.duration(b * 1e9)}·n + {units.duration(c * 1e9)}·n·(m + n/2); "
            f"fitted on {units.count(number(model, 'recompute_n'))} requests"
        )
        error = number(model, "recompute_error")
        if error is not None:
            text += f", {units.share(error)} median error on requests held out"
        yield "recompute model", text
    fixed, per_byte = _coefficients(model, "restore_coefficients_s", 2)
    if fixed is not None and per_byte is not None:
        yield (
            "restore model",
            f"{units.duration(fixed * 1e9)} + {units.duration(per_byte * 2**20 * 1e9)} a MiB; "
            f"fitted on {units.count(number(model, 'restore_n'))} restores",
        )
    if note := label(found, "note"):
        yield "note", note


def _coefficients(model: Any, name: str, length: int) -> list[float | None]:
    values = pick(model, name)
    if not isinstance(values, list) or len(values) != length:
        return [None] * length
    return [value if units.known(value) else None for value in values]
