"""What a GPU's samples say of the requests: starvation, the copies of restores, the prefills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType

from kvprobe import units
from kvprobe.digest import BOUNDS, label, number, pick, rows
from kvprobe.reports._text.page import Column, Page, labelled, table


def work(item: Any, page: Page) -> Iterator[RenderableType]:
    """Lines of one GPU, and a table of its prefills; nothing where nothing is known."""
    lines = [*_starvation(item), *_copy(item), *_windows(item), *_throttling(item)]
    if lines:
        yield labelled(lines)
    groups = rows(item, "prefills")
    if groups:
        yield table(page, _PREFILLS, groups)
        whys = {label(group, "why") or "" for group in groups if label(group, "why")}
        if whys:
            yield labelled([("unknown", "; ".join(sorted(whys)))])


def _starvation(item: Any) -> Iterator[tuple[str, str]]:
    found = pick(item, "starvation")
    restores = number(found, "restores")
    if restores is None:
        return
    of = f"of {units.duration(number(found, 'covered_ns'))} sampled"
    count = f"n={units.count(number(found, 'n'))}, {units.count(restores)} restores"
    if not restores:
        idle = units.duration(number(found, "idle_ns"))
        yield "starved", f"no restore was in flight; idle {idle} {of}; {count}"
        return
    starved = _interval(found, ("starved_ns", "low_ns", "high_ns"), units.duration)
    restore, idle = (units.duration(number(found, key)) for key in ("restore_ns", "idle_ns"))
    yield (
        "starved",
        f"idle {starved} while a restore was in flight ({restore}); idle {idle} {of}; {count}",
    )


def _copy(item: Any) -> Iterator[tuple[str, str]]:
    copy = pick(item, "restore_copy")
    if number(copy, "received_bytes") is None:
        return
    received = _interval(copy, ("received_bytes", "low_bytes", "high_bytes"), units.size)
    text = f"{received} came over PCIe during {units.count(number(copy, 'restores'))} restores"
    text += f" of {units.size(number(copy, 'restored_bytes'))}"
    if (share := number(copy, "link_share")) is not None:
        text += f", {units.share(share)} of the link"
    yield "last leg", f"{text}; n={units.count(number(copy, 'n'))}"


def _windows(item: Any) -> Iterator[tuple[str, str]]:
    windows = rows(item, "windows")
    counts = Counter(label(window, "bound") or "unknown" for window in windows)
    if counts:
        said = [f"{BOUNDS.get(name, name)} {n}" for name, n in counts.most_common()]
        yield "its windows", f"{', '.join(said)} (of {len(windows)}, each a second or more)"


def _throttling(item: Any) -> Iterator[tuple[str, str]]:
    found = pick(item, "throttling")
    held, readings = number(found, "held"), number(found, "readings")
    if not held or not readings:
        return
    text = f"{units.share(held / readings)} of the readings in prefills (n={units.count(readings)})"
    slow, free = number(found, "clock_held_hz"), number(found, "clock_free_hz")
    if slow and free:
        text += f", at {slow / 1e6:,.0f} MHz instead of {free / 1e6:,.0f}"
    if (longer := number(found, "slowdown")) is not None:
        n = units.count(number(found, "prefills_held"))
        text += f"; such prefills took {units.fixed(longer)} times as long (n={n})"
    yield "throttled", text


def _interval(
    node: Any, keys: tuple[str, str, str], show: Callable[[float | int | None], str]
) -> str:
    mid, low, high = (number(node, key) for key in keys)
    return units.interval(mid, low, high, show)


def _tokens(group: Any) -> str:
    low, high = number(group, "tokens_low"), number(group, "tokens_high")
    return units.count(low) if low == high else f"{units.count(low)}-{units.count(high)}"


def _share(group: Any, name: str) -> str:
    """Whole percents: a table has no room for more."""
    mid, low, high = (number(group, "shares", name, key) for key in ("mid", "low", "high"))
    if mid is None or low is None or high is None:
        return units.UNKNOWN
    return f"{mid * 100:.0f} % ({low * 100:.0f}{units.DASH}{high * 100:.0f})"


def _roofline(group: Any) -> str:
    least, took = number(group, "roofline_ns"), number(group, "prefill_ns")
    return units.UNKNOWN if least is None or not took else units.share(least / took)


_PREFILLS = (
    Column("computed", _tokens),
    Column("prefills", lambda group: units.count(number(group, "prefills"))),
    Column("time", lambda group: units.duration(number(group, "prefill_ns"))),
    Column("memory", lambda group: _share(group, "hbm")),
    Column("tensor", lambda group: _share(group, "compute")),
    Column("PCIe", lambda group: _share(group, "pcie"), from_width=110),
    Column("roofline", _roofline),
    Column("bound by", lambda g: BOUNDS.get(label(g, "bound") or "", "unknown"), justify="left"),
    Column("n", lambda group: units.count(number(group, "samples"))),
)
