"""The ledger: one line a request, or everything about one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.digest import Document, label, number, rows
from kvprobe.errors import KvprobeError
from kvprobe.reports._text.page import (
    PART_STYLES,
    VERDICT_STYLES,
    Column,
    Page,
    heading,
    labelled,
    paragraph,
    table,
)

_ID_WIDTH = 10


def ledger(document: Document, page: Page) -> Iterator[RenderableType]:
    """The requests that ``page.requests`` asks for: ``all``, a number of the worst, or one id.

    Raises:
        KvprobeError: there is no such request.
    """
    items = rows(document, "requests")
    if page.requests == "all":
        yield heading("Requests", f"all {len(items):,}, by arrival")
        yield from _lines(page, sorted(items, key=lambda row: number(row, "t_arrival_ns") or 0))
    elif page.requests.isdecimal():
        shown = sorted(items, key=_badness, reverse=True)[: int(page.requests)]
        if shown:
            lost = sum(1 for row in shown if digest.regret_ns(row))
            what = f"the {lost:,} that lost most" if lost else ""
            if lost < len(shown):
                what = f"{what}, then the slowest" if lost else f"the {len(shown):,} slowest"
            yield heading("Requests", f"{what}; {len(shown):,} of {len(items):,}")
            yield from _lines(page, shown)
    else:
        yield from _detail(_find(items, page.requests), page)


def _badness(row: Any) -> tuple[float, float]:
    return digest.regret_ns(row) or 0.0, number(row, "ttft_ns") or 0.0


def _find(items: list[Mapping[str, Any]], wanted: str) -> Mapping[str, Any]:
    name = wanted.removeprefix("id:")
    ids = {label(row, "id"): row for row in items}
    if name in ids:
        return ids[name]
    start, cut, end = name.replace("...", "…").partition("…")
    begun = [row for key, row in ids.items() if key and key.startswith(start)]
    if cut:
        begun = [row for row in begun if (label(row, "id") or "").endswith(end)]
    close = begun or [row for key, row in ids.items() if key and name in key]
    if len(close) == 1:
        return close[0]
    raise KvprobeError(
        f"{len(close)} requests have {name!r} in their id"
        if close
        else f"no request {name!r} in this capture",
        "`--requests all` lists them; the first characters that only one id has are enough",
    )


def _lines(page: Page, items: list[Mapping[str, Any]]) -> Iterator[RenderableType]:
    wide = page.width >= 132
    yield table(
        page,
        [
            Column("request", _name, "left"),
            Column("TTFT", lambda row: units.duration(number(row, "ttft_ns"))),
            Column("prompt", lambda row: units.count(number(row, "tokens", "prompt")),
                   from_width=106),
            Column("stored", lambda row: units.count(_stored_tokens(row))),
            Column("bytes", lambda row: units.size(number(row, "restore", "bytes")) if
                   row.get("restore") else units.DASH, from_width=142),
            Column("reads", lambda row: units.count(number(row, "restore", "ops")) if
                   row.get("restore") else units.DASH, from_width=150),
            Column("parts", lambda row: part_bar(row, 10), "left", from_width=162),
            Column("restore", lambda row: _exposed(row, wide=wide)),
            Column("recompute", lambda row: _recompute(row, wide=wide), from_width=96),
            Column("choice", choice, "left"),
            Column("gain", gain, "left"),
            Column("tied by", lambda row: digest.attribution_class(row) or units.DASH, "left",
                   from_width=116),
        ],
        items,
    )  # fmt: skip
    yield paragraph(
        "restore: before the request's own prefill, estimated where it recomputed; "
        "gain: time saved against the other choice, 90 % interval.",
    )


def _name(row: Any) -> str:
    return bars.shortened(label(row, "id") or units.UNKNOWN, _ID_WIDTH)


def _stored_tokens(row: Any) -> float | None:
    stored = number(row, "tokens", "stored")
    return number(row, "tokens", "storage_hit") if stored is None else stored


def _exposed(row: Any, *, wide: bool) -> str:
    exposed = number(row, "restore", "exposed_ns")
    if exposed is not None:
        return units.duration(exposed)
    estimate = number(row, "restore_estimate", "estimate_ns")
    if estimate is None:
        return units.DASH
    low, high = (number(row, "restore_estimate", key) for key in ("low_ns", "high_ns"))
    text = units.interval(estimate, low, high, units.duration) if wide else units.duration(estimate)
    return f"~{text}"


def _recompute(row: Any, *, wide: bool) -> str:
    """The estimate with its interval; where there is little room, the interval alone."""
    mid, low, high = (number(row, "recompute", key) for key in ("estimate_ns", "low_ns", "high_ns"))
    text = units.interval(mid, low, high, units.duration)
    if wide or "(" not in text or low is None or high is None:
        return text
    name = units.duration(mid).split(" ")[1]
    return f"{text[text.index('(') + 1 : -1]} {name}"


def choice(row: Any) -> Text:
    """What the engine did, coloured by whether it was the cheaper way."""
    verdict = label(row, "verdict") or ""
    if "_" in verdict:
        what = verdict.split("_")[0]
    else:
        hit = number(row, "tokens", "storage_hit")
        what = "restore" if row.get("restore") or hit else "recompute"
    return Text(what, VERDICT_STYLES.get(verdict, ""))


def gain(row: Any) -> Text:
    """``won 1.20 s (1.09-1.31)``, ``lost ...``, or an interval that spans zero."""
    verdict = label(row, "verdict") or ""
    mid, low, high = (number(row, key) for key in ("gain_ns", "gain_low_ns", "gain_high_ns"))
    style = VERDICT_STYLES.get(verdict, "")
    if mid is None:
        return Text(units.UNKNOWN, "dim")
    if verdict.endswith("_lost"):
        mid, low, high = -mid, _negative(high), _negative(low)
    word = verdict.rpartition("_")[2] if style else digest.undecided(row)
    return Text(f"{word} {units.interval(mid, low, high, units.duration)}", style)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def part_bar(row: Any, width: int) -> Text:
    """The parts of one restore as a bar; empty where one of them is unknown."""
    values = [number(row, "restore", key) for key, _, _ in digest.RESTORE_PARTS]
    bar = Text()
    if None in values:
        return bar
    for filled, style in zip(bars.stacked(values, width), PART_STYLES, strict=True):
        bar.append(filled, style)
    return bar


def _detail(row: Mapping[str, Any], page: Page) -> Iterator[RenderableType]:
    yield heading("Request", label(row, "id") or units.UNKNOWN)
    tokens = "; ".join(
        f"{name} {units.count(number(row, 'tokens', key))}"
        for key, name in (
            ("prompt", "prompt"),
            ("device_hit", "in device memory"),
            ("host_hit", "in host memory"),
            ("storage_hit", "restored"),
            ("computed", "computed"),
        )
        if key != "host_hit" or number(row, "tokens", key)
    )
    yield labelled(
        [
            ("tokens", tokens),
            ("TTFT", units.duration(number(row, "ttft_ns"))),
            ("choice", Text.assemble(choice(row), ", ", gain(row))),
            ("recompute", _recompute(row, wide=True)),
            ("tied by", ", ".join(_attribution(row)) or units.UNKNOWN),
        ]
    )
    spans = [number(row, "spans", key) for key, _, _ in digest.SPANS]
    lines = bars.waterfall(spans, page.bar_width(50, most=96))
    yield table(
        page,
        [
            Column("span", lambda item: digest.SPANS[item][1], "left"),
            Column("time", lambda item: units.duration(spans[item])),
            Column("", lambda item: Text(lines[item], "cyan"), "left"),
        ],
        range(len(spans)),
    )
    if row.get("restore"):
        yield from _restore_detail(row, page)


def _attribution(row: Any) -> list[str]:
    return [
        f"{name} {units.share(part)}"
        for name, _ in digest.ATTRIBUTION
        if (part := number(row, "attribution", name))
    ]


def _restore_detail(row: Any, page: Page) -> Iterator[RenderableType]:
    yield heading(
        "Its restore",
        f"{units.size(number(row, 'restore', 'bytes'))} in "
        f"{units.count(number(row, 'restore', 'ops'))} reads, "
        f"{units.count(number(row, 'restore', 'commands'))} block requests, "
        f"{units.fixed(number(row, 'restore', 'effective_depth'))} in flight on average",
    )
    if bar := part_bar(row, page.bar_width(4, most=96)):
        yield paragraph(bar)
    pairs = [
        (name, f"{units.duration(number(row, 'restore', key)):>10}  {meaning}")
        for key, name, meaning in digest.RESTORE_PARTS
    ]
    hidden = units.duration(number(row, "restore", "hidden_ns"))
    pairs.append(("hidden", f"{hidden:>10}  overlapped by this request's own prefill"))
    yield labelled([(name, Text(text)) for name, text in pairs])
