"""When a log line was written, from the stamps in it.

Stamps without a zone are local time of this machine, unless somebody who received the line put a
stamp with a zone before it (a container runtime): then they are of the zone, and the year, that
brings both together.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache
from typing import NamedTuple

SECOND_NS = 1_000_000_000
_DAY_SECONDS = 86_400
_YEARS_BACK = 8
"""Within any eight years but those around 1900 and 2100 there is a 29 February."""
_ZONE_STEP_NS = 900 * SECOND_NS
"""Zones are whole quarters of an hour apart."""

_STAMP = re.compile(
    r"""
    (?: (?<!\d) (?P<year>\d{4}) - (?P<month>\d\d) - (?P<day>\d\d) [T\ ]       # ISO 8601, RFC 3339
      | (?<![\d-]) (?P<v_month>\d\d) - (?P<v_day>\d\d) \                      # vLLM
      | (?<!\w) [IWEFDV] (?P<g_year>\d{4})? (?P<g_month>\d\d) (?P<g_day>\d\d) \     # glog
      | (?<![\d/]) (?P<r_month>\d\d) / (?P<r_day>\d\d) / (?P<r_year>\d\d) \   # rich
    )
    (?P<hour>\d\d) : (?P<minute>\d\d) : (?P<second>\d\d)
    (?: [.,] (?P<fraction>\d{1,9}) )?
    (?P<zone> Z | [+-]\d\d:?\d\d | \ [+-]\d{4}\] )?
    """,
    re.VERBOSE | re.ASCII,
)


_CLOCK = re.compile(r":\d\d:\d\d", re.ASCII)
_BEFORE_CLOCK = len("2026-12-01T17")


class Stamp(NamedTuple):
    """The wall clock showed ``wall_ns`` or a value less than ``width_ns`` above it."""

    wall_ns: int
    width_ns: int


def stamped(text: str) -> bool:
    """Whether there is something like a stamp in ``text``."""
    return bool(_stamps(text, 0, len(text)))


def written(
    text: str, start: int, end: int, now_wall_ns: int, received: Stamp | None = None
) -> Stamp | None:
    """When the message at ``text[start:end]`` was written; None where nothing tells.

    It is the stamp nearest before the message, or the first in it where there is none. The time at
    which somebody else received the line is finer, but later by an unknown time: it counts where it
    agrees with the line's own stamp, or where there is none.

    Args:
        text: the line.
        start: where the message begins.
        end: where it ends.
        now_wall_ns: the wall clock by now, for stamps without a year.
        received: when the line was received, if that is not in ``text``.
    """
    today = now_wall_ns // (_DAY_SECONDS * SECOND_NS)
    found = _stamps(text, 0, start) or _stamps(text, start, end)[:1]
    own: Stamp | None = None
    while found and own is None:
        nearest = found.pop()
        if received is None:
            received = next((stamp for other in found if (stamp := _zoned(other[0]))), None)
        own = _zoned(nearest[0]) or _unzoned(nearest[0], today, received)
    if own is None or received is None:
        return own or received
    return received if 0 <= received.wall_ns - own.wall_ns < own.width_ns else own


def iso(text: str) -> Stamp | None:
    """The stamp that a text with date, time and zone is."""
    found = _STAMP.match(text)
    return _zoned(found[0]) if found else None


def _stamps(text: str, start: int, end: int) -> list[re.Match[str]]:
    """What looks like a stamp. Colons are found faster than dates."""
    found = []
    for clock in _CLOCK.finditer(text, start, end):
        stamp = _STAMP.search(text, max(clock.start() - _BEFORE_CLOCK, start), end)
        if stamp is not None and stamp.start("minute") == clock.start() + 1:
            found.append(stamp)
    return found


@lru_cache(maxsize=1024)
def _zoned(text: str) -> Stamp | None:
    """The stamp that has a zone; None for others."""
    found = _STAMP.match(text)
    zone = found and found["zone"]
    if not found or not zone:
        return None
    zone = zone.strip(" ]").replace(":", "")
    ahead = 0 if zone == "Z" else int(zone[:3]) * 60 + int(zone[0] + zone[3:])
    year, *rest = _fields(found)
    wall_ns = None if year is None else _utc_ns(year, *rest, ahead)
    fraction_ns, width_ns = _fraction(found["fraction"])
    return None if wall_ns is None else Stamp(wall_ns + fraction_ns, width_ns)


@lru_cache(maxsize=1024)
def _unzoned(text: str, today: int, received: Stamp | None) -> Stamp | None:
    """The stamp that has no zone."""
    found = _STAMP.match(text)
    if found is None or found["zone"]:
        return None
    year, month, day, *clock = _fields(found)
    fraction_ns, width_ns = _fraction(found["fraction"])
    if received is not None:
        utc_ns = _utc_ns(year or 2000, month, day, *clock, 0)  # a leap year
        if utc_ns is None:
            return None
        apart_ns = utc_ns + fraction_ns - received.wall_ns + _ZONE_STEP_NS // 2
        return Stamp(received.wall_ns + apart_ns % _ZONE_STEP_NS - _ZONE_STEP_NS // 2, width_ns)
    date = month, day, *clock
    local = _latest(*date, today) if year is None else _local(year, *date)
    if local is None:
        return None
    first, last = local
    return Stamp(first * SECOND_NS + fraction_ns, (last - first) * SECOND_NS + width_ns)


def _fields(found: re.Match[str]) -> tuple[int | None, int, int, int, int, int]:
    year = found["year"] or found["g_year"]
    if found["r_year"]:
        year = "20" + found["r_year"]
    month = found["month"] or found["v_month"] or found["g_month"] or found["r_month"]
    day = found["day"] or found["v_day"] or found["g_day"] or found["r_day"]
    clock = int(found["hour"]), int(found["minute"]), int(found["second"])
    return int(year) if year else None, int(month), int(day), *clock


def _fraction(digits: str | None) -> tuple[int, int]:
    """Nanoseconds of a fraction of a second, and of its last digit."""
    if not digits:
        return 0, SECOND_NS
    unit_ns = 10 ** (9 - len(digits))
    return int(digits) * unit_ns, unit_ns


@lru_cache(maxsize=1024)
def _utc_ns(
    year: int, month: int, day: int, hour: int, minute: int, second: int, ahead_minutes: int
) -> int | None:
    """Nanoseconds since 1970 of a time in a zone that many minutes ahead of UTC."""
    try:
        zone = timezone(timedelta(minutes=ahead_minutes)) if ahead_minutes else UTC
        moment = datetime(year, month, day, hour, minute, second, tzinfo=zone)
        return int(moment.timestamp()) * SECOND_NS
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=1024)
def _latest(
    month: int, day: int, hour: int, minute: int, second: int, today: int
) -> tuple[int, int] | None:
    """The last such local time that is not more than a day ahead of now."""
    this_year = datetime.fromtimestamp(today * _DAY_SECONDS, UTC).year
    for year in range(this_year + 1, this_year - _YEARS_BACK - 1, -1):
        local = _local(year, month, day, hour, minute, second)
        if local is not None and local[0] < (today + 2) * _DAY_SECONDS:
            return local
    return None


@lru_cache(maxsize=1024)
def _local(
    year: int, month: int, day: int, hour: int, minute: int, second: int
) -> tuple[int, int] | None:
    """Seconds since 1970 of a local time: both where the clocks were set back, else twice one.

    Of a time that the clocks were set over it is what it is by the zone before and behind.
    """
    try:
        moment = datetime(year, month, day, hour, minute, second)
        either = int(moment.timestamp()), int(moment.replace(fold=1).timestamp())
    except (ValueError, OverflowError, OSError):
        return None
    return min(either), max(either)
