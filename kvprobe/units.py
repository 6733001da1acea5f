"""Numbers as people read them: one rule, used by every report and screen.

Three significant digits. Durations go ns, us, ms, s, min, h by powers of 1000 and 60; sizes are
binary (KiB, MiB, GiB); counts carry thousands separators; shares are percent. An interval is
written once in the unit of its middle: ``1.24 ms (1.02-1.61)``. Unknown (None, NaN) is the word
``unknown``, never a zero or a blank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

UNKNOWN = "unknown"
DASH = "\N{EN DASH}"

Number = float | int | None
Scale = tuple[float, str]
"""A factor to divide by and the unit's name."""

_DURATIONS: tuple[Scale, ...] = (
    (1, "ns"),
    (1e3, "µs"),
    (1e6, "ms"),
    (1e9, "s"),
    (120e9, "min"),
    (7200e9, "h"),
)
_DIVISORS = {"min": 60e9, "h": 3600e9}
_SIZES: tuple[Scale, ...] = (
    (1, "B"),
    (2**10, "KiB"),
    (2**20, "MiB"),
    (2**30, "GiB"),
    (2**40, "TiB"),
)


def known(value: object) -> bool:
    """Whether a value is a finite number (a bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def digits(value: float) -> str:
    """Three significant digits, never an exponent; whole numbers from 100 up."""
    size = abs(value)
    if size == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    rounded = round(value, decimals)
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{min(decimals, 6)}f}"


def _scale(value: float, scales: tuple[Scale, ...]) -> Scale:
    chosen = scales[0]
    for threshold, name in scales:
        # 999.6 us would round to "1000 us": step up where three digits no longer fit.
        if abs(value) >= threshold * 0.9995:
            chosen = (threshold, name)
    return _DIVISORS.get(chosen[1], chosen[0]), chosen[1]


def _scaled(value: Number, scales: tuple[Scale, ...], suffix: str = "") -> str:
    if value is None or not known(value):
        return UNKNOWN
    factor, name = _scale(value, scales)
    text = f"{value:,.0f}" if factor == 1 and value == int(value) else digits(value / factor)
    return f"{text} {name}{suffix}"


def duration(nanoseconds: Number) -> str:
    """A time span, ``850 ns`` to ``3.20 h``."""
    return _scaled(nanoseconds, _DURATIONS)


def size(count: Number) -> str:
    """Bytes, ``512 B`` to ``1.50 TiB``."""
    return _scaled(count, _SIZES)


def rate(bytes_per_second: Number) -> str:
    """Bytes a second, ``412 MiB/s``."""
    return _scaled(bytes_per_second, _SIZES, "/s")


def count(value: Number) -> str:
    """A count or another plain number: ``1,240``; fractions keep three digits."""
    if value is None or not known(value):
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) else digits(value)


def counted(number: int, one: str, several: str) -> str:
    """``1 request was``, ``1,240 requests were``: a count before what it counts."""
    return f"{number:,} {one if number == 1 else several}"


def fixed(value: Number, decimals: int = 2) -> str:
    """A figure near 1, such as a queue depth or a ratio, with fixed decimals."""
    if value is None or not known(value):
        return UNKNOWN
    least = 10.0**-decimals
    return f"<{least:.{decimals}f}" if 0 < value < least / 2 else f"{value:,.{decimals}f}"


def share(value: Number) -> str:
    """A share of 1 as percent: ``41.2 %``; a trace is ``<0.1 %``, never ``0.0 %``."""
    if value is None or not known(value):
        return UNKNOWN
    percent = value * 100
    if 0 < abs(percent) < 0.05:
        return "<0.1 %"
    if 99.95 <= percent < 100:
        return ">99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def interval(mid: Number, low: Number, high: Number, show: Callable[[Number], str]) -> str:
    """``mid (low-high)`` in the unit that ``show`` picks for the middle."""
    text = show(mid)
    if text == UNKNOWN:
        return UNKNOWN
    if not (known(low) and known(high)):
        return f"{text} (interval unknown)"
    return f"{text} ({_like(mid, low, show)}{_dash(low)}{_like(mid, high, show)})"


def _dash(low: Number) -> str:
    return " to " if low is not None and low < 0 else DASH


def _like(mid: Number, value: Number, show: Callable[[Number], str]) -> str:
    """``value`` in the unit that ``mid`` is shown in, without the unit's name."""
    assert mid is not None and value is not None
    scales = {duration: _DURATIONS, size: _SIZES, rate: _SIZES}.get(show)
    if scales is None:
        return show(value).removesuffix(" %")
    factor, _ = _scale(mid, scales)
    return digits(value / factor)


def quantity(value: Number, unit: str | None) -> str:
    """A value with the unit a finding or a proposal names (``ns``, ``B``, ``share``, ...)."""
    shows: dict[str, Callable[[Number], str]] = {
        "ns": duration,
        "B": size,
        "bytes": size,
        "B/s": rate,
        "bytes/s": rate,
        "bytes_per_s": rate,
        "share": share,
    }
    show = shows.get(unit or "")
    if show is not None:
        return show(value)
    text = count(value)
    return text if text == UNKNOWN or not unit else f"{text} {unit}"
