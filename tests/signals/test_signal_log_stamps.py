"""When a line was written: the stamps of real logs, zones, new year, clocks set back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.clock import ClockSample, Moment, WallClock
from kvprobe.signals import stamps
from kvprobe.signals.log import LogFeed
from kvprobe.signals.stamps import Stamp
from tests.signals.log_lines import (
    LINES,
    OFFSET_NS,
    SECOND_NS,
    hit,
    read_log,
    requests,
    steady_clock,
)

MS = 1_000_000
US = 1_000
NOW_NS = int(datetime(2026, 12, 3, 12, 0, tzinfo=UTC).timestamp()) * SECOND_NS
BASE_NS = int(datetime(2026, 12, 1, 17, 20, 23, tzinfo=UTC).timestamp()) * SECOND_NS


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Local time is UTC unless a test says otherwise."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()
        for cached in (stamps._unzoned, stamps._latest, stamps._local):
            cached.cache_clear()

    set_zone("UTC")
    yield set_zone
    monkeypatch.undo()
    time.tzset()
    stamps._unzoned.cache_clear()
    stamps._latest.cache_clear()
    stamps._local.cache_clear()


def written(prefix: str, now_ns: int = NOW_NS, received: Stamp | None = None) -> Stamp | None:
    text = prefix + "Request a hit"
    return stamps.written(text, len(prefix), len(text), now_ns, received)


@pytest.mark.parametrize(
    ("prefix", "after_ns", "width_ns"),
    [
        ("(EngineCore pid=27411) DEBUG 12-01 17:20:23 [x.py:945] ", 0, SECOND_NS),
        ("INFO 12-01 17:20:23.456 [x.py:945] ", 456 * MS, MS),
        ("[2026-12-01 17:20:23,990] LMCache INFO: ", 990 * MS, MS),
        ("[2026-12-01 17:20:23] ", 0, SECOND_NS),
        ("[2026-12-01 17:20:23 TP0] Prefill ", 0, SECOND_NS),
        ("2026-12-01T17:20:23.123456789Z ", 123_456_789, 1),
        ("2026-12-01T17:20:23Z ", 0, SECOND_NS),
        ("2026-12-01T19:20:23.5+02:00 ", 500 * MS, 100 * MS),
        ("2026-12-01T12:50:23.25-0430 ", 250 * MS, 10 * MS),
        ("[2026-12-01 18:20:23 +0100] [99] [INFO] ", 0, SECOND_NS),
        ("I1201 17:20:23.862865  2771 client_metric.cpp:102] ", 862_865 * US, US),
        ("E20261201 17:20:23.000001  2771 client_metric.cpp:102] ", US, US),
        ("[12/01/26 17:20:23] INFO     ", 0, SECOND_NS),
        # The nearest counts, and only what is a date and a time.
        ("[2020-01-01 00:00:00] [2026-12-01 17:20:23,001] ", MS, MS),
        ("[2026-12-01 17:20:23,002] 99-99 17:20:23 ", 2 * MS, MS),
        ("[2026-12-01 17:20:23,003] 2026-02-30 17:20:23 at 25:61:00 and 1:02:03 ", 3 * MS, MS),
        ("[2026-12-01 17:20:23,004] id=112-01 17:20:29 XI1201 17:20:29.5 ", 4 * MS, MS),
    ],
)
def test_stamps_of_real_logs(prefix: str, after_ns: int, width_ns: int) -> None:
    assert written(prefix) == Stamp(BASE_NS + after_ns, width_ns)


@pytest.mark.parametrize(
    "prefix",
    ["", "0.00.026.269 I srv ", "INFO: ", "17:20:23 ", "2026-12-01 ", "12-01 17:20 ", "::"],
)
def test_lines_without_a_stamp(prefix: str) -> None:
    assert written(prefix) is None


def test_a_message_that_holds_its_stamp() -> None:
    text = "[2026-12-01 17:20:23 TP0] Prefill at 2026-12-01 17:20:24"
    assert stamps.written(text, 0, len(text), NOW_NS) == Stamp(BASE_NS, SECOND_NS)


# ---------------------------------------------------------------- years


@pytest.mark.parametrize(
    ("stamp", "now", "year"),
    [
        ("12-31 23:59:59", datetime(2027, 1, 1, 0, 0, 1, tzinfo=UTC), 2026),
        ("01-01 00:00:00", datetime(2027, 1, 1, 0, 0, 0, tzinfo=UTC), 2027),
        ("01-01 00:00:01", datetime(2026, 12, 31, 23, 59, 58, tzinfo=UTC), 2027),
        ("12-03 11:00:00", datetime(2026, 12, 3, 12, tzinfo=UTC), 2026),
        ("12-05 12:00:00", datetime(2026, 12, 3, 12, tzinfo=UTC), 2025),
        ("02-29 12:00:00", datetime(2026, 12, 3, 12, tzinfo=UTC), 2024),
        ("02-29 12:00:00", datetime(2028, 3, 1, 12, tzinfo=UTC), 2028),
    ],
)
def test_a_stamp_without_a_year_is_of_the_last_such_day(
    stamp: str, now: datetime, year: int
) -> None:
    got = written(stamp + " ", int(now.timestamp()) * SECOND_NS)
    assert got is not None
    then = datetime.fromtimestamp(got.wall_ns / SECOND_NS, UTC)
    assert then.strftime("%Y %m-%d %H:%M:%S") == f"{year} {stamp}"


# ---------------------------------------------------------------- zones


def test_stamps_without_a_zone_are_local_time(zone: Callable[[str], None]) -> None:
    zone("America/New_York")
    assert written("12-01 12:20:23 ") == Stamp(BASE_NS, SECOND_NS)
    assert written("I1201 12:20:23.000007 ") == Stamp(BASE_NS + 7 * US, US)
    assert written("2026-12-01T17:20:23Z ") == Stamp(BASE_NS, SECOND_NS)


def test_a_time_that_comes_twice_is_both(zone: Callable[[str], None]) -> None:
    """In Berlin 02:30 on 25 October 2026 is 00:30 and 01:30 UTC."""
    zone("Europe/Berlin")
    first_ns = int(datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp()) * SECOND_NS
    assert written("10-25 02:30:00 ") == Stamp(first_ns, 3601 * SECOND_NS)
    assert written("2026-10-25 02:30:00,500 ") == Stamp(first_ns + 500 * MS, 3600 * SECOND_NS + MS)
    assert written("10-25 01:59:59 ") == Stamp(first_ns - 1801 * SECOND_NS, SECOND_NS)
    assert written("10-25 03:00:00 ") == Stamp(first_ns + 5400 * SECOND_NS, SECOND_NS)


def test_a_zone_may_change_without_summer_time(zone: Callable[[str], None]) -> None:
    """Moscow went from UTC+4 to UTC+3 for good on 26 October 2014 at 02:00."""
    zone("Europe/Moscow")
    first_ns = int(datetime(2014, 10, 25, 21, 30, tzinfo=UTC).timestamp()) * SECOND_NS
    assert written("2014-10-26 01:30:00 ") == Stamp(first_ns, 3601 * SECOND_NS)


def test_a_time_that_never_was(zone: Callable[[str], None]) -> None:
    """In Berlin 02:30 on 29 March 2026 was left out: 00:30 or 01:30 UTC."""
    zone("Europe/Berlin")
    first_ns = int(datetime(2026, 3, 29, 0, 30, tzinfo=UTC).timestamp()) * SECOND_NS
    assert written("2026-03-29 02:30:00 ") == Stamp(first_ns, 3601 * SECOND_NS)


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2037, 1, 1)),
    st.sampled_from(
        ["UTC", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Europe/Dublin"]
    ),
)
def test_every_local_time_is_found_again(moment: datetime, name: str) -> None:
    """The independent source is time.localtime, the other way round."""
    os.environ["TZ"] = name
    time.tzset()
    try:
        stamps._local.cache_clear()
        stamps._unzoned.cache_clear()
        at = int((moment - datetime(1970, 1, 1)).total_seconds())
        text = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(at))
        got = written(text)
        assert got is not None
        assert got.wall_ns <= at * SECOND_NS < got.wall_ns + got.width_ns
        assert got.width_ns in (SECOND_NS, 1801 * SECOND_NS, 3601 * SECOND_NS)
    finally:
        os.environ["TZ"] = "UTC"
        time.tzset()


# ---------------------------------------------------------------- who received the line


@pytest.mark.parametrize("hours", [-12, -9.5, 0, 1, 5.75, 14])
@pytest.mark.parametrize("year", ["", "2026-"])
def test_a_container_in_another_zone(hours: float, year: str) -> None:
    """Its runtime stamps in UTC, its engine in whatever zone: they are put together."""
    there = datetime(2026, 12, 31, 23, 50, tzinfo=UTC)
    local = there + timedelta(hours=hours)
    if year:
        year = f"{local.year}-"
    now_ns = int((there + timedelta(days=40)).timestamp()) * SECOND_NS
    prefix = f"{there:%Y-%m-%dT%H:%M:%S}.123456789Z stdout F INFO {year}{local:%m-%d %H:%M:%S} [x] "
    base_ns = int(there.timestamp()) * SECOND_NS
    assert written(prefix, now_ns) == Stamp(base_ns + 123_456_789, 1)


def test_a_line_that_was_received_late_has_its_own_time() -> None:
    own = "DEBUG 12-01 17:20:23 [x] "
    late = written("2026-12-01T17:20:24.000000000Z stdout F " + own)
    assert late == Stamp(BASE_NS, SECOND_NS)
    early = written("2026-12-01T17:20:22.999999999Z stdout F " + own)
    assert early == Stamp(BASE_NS, SECOND_NS)
    agrees = written("2026-12-01T17:20:23.999999999Z stdout F " + own)
    assert agrees == Stamp(BASE_NS + 999_999_999, 1)


def test_a_time_of_receipt_that_is_not_in_the_line() -> None:
    receipt = Stamp(BASE_NS + 7 * MS, US)
    assert written("no stamp ", received=receipt) == receipt
    assert written("12-01 19:20:23 ", received=receipt) == receipt
    assert written("12-01 19:20:22 ", received=receipt) == Stamp(BASE_NS - SECOND_NS, SECOND_NS)


# ---------------------------------------------------------------- moments


def test_a_moment_is_as_wide_as_the_stamp_and_the_clock(tmp_path: Path) -> None:
    clock = steady_clock(uncertainty_ns=11)
    path = tmp_path / "engine.log"
    path.write_bytes(hit("a", prefix="[2026-12-01 17:20:23,990] ") + hit("b", prefix="none "))
    feed = LogFeed(str(path), LINES, now=lambda: 1 << 62)
    a, b = requests(feed.poll(clock))
    at_ns = BASE_NS + 990 * MS - OFFSET_NS
    assert a.times == {"scheduled_ns": Moment(at_ns - 11, at_ns + MS - 1 + 11)}
    assert b.times == {}
    feed.close(clock)


@pytest.mark.parametrize(
    ("now_ns", "latest_ns"),
    [
        (BASE_NS - OFFSET_NS + 250 * MS, BASE_NS - OFFSET_NS + 250 * MS),
        (BASE_NS - OFFSET_NS + 2 * SECOND_NS, BASE_NS - OFFSET_NS + SECOND_NS - 1),
        # Of the future: somebody's clock is wrong, and the stamp is taken as it is.
        (BASE_NS - OFFSET_NS - 1, BASE_NS - OFFSET_NS + SECOND_NS - 1),
    ],
)
def test_nothing_was_written_after_it_was_read(tmp_path: Path, now_ns: int, latest_ns: int) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(hit("a", prefix="[2026-12-01 17:20:23] "))
    feed = LogFeed(str(path), LINES, now=lambda: now_ns)
    (news,) = requests(feed.poll(steady_clock()))
    assert news.times["scheduled_ns"] == Moment(BASE_NS - OFFSET_NS, latest_ns)
    feed.close(steady_clock())


def test_a_line_written_now_was_written_now(tmp_path: Path) -> None:
    """With the clocks of this machine, a stamp of a second and one of a nanosecond."""
    clock = WallClock()
    path = tmp_path / "engine.log"
    feed = LogFeed(str(path), LINES)
    before_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    whole = time.strftime("%m-%d %H:%M:%S ", time.localtime(wall_ns // SECOND_NS))
    exact = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall_ns // SECOND_NS))
    exact += f".{wall_ns % SECOND_NS:09d}Z "
    path.write_bytes(hit("a", prefix=whole) + hit("b", prefix=exact))
    a, b = (news.times["scheduled_ns"] for news in requests(feed.poll(clock)))
    after_ns = time.monotonic_ns()
    assert a.earliest_ns <= after_ns and a.latest_ns >= before_ns
    assert a.latest_ns <= after_ns and a.latest_ns - a.earliest_ns <= SECOND_NS
    assert before_ns - US <= b.middle_ns <= after_ns and b.uncertainty_ns < 100 * US
    feed.close(clock)


def test_a_line_that_docker_received(tmp_path: Path) -> None:
    text = '{"log":"%s","stream":"stderr","time":"2026-12-01T17:20:23.25Z"}\n'
    line = hit("a", prefix="DEBUG 12-01 09:20:23 [x] ").decode()[:-1]
    (news,) = requests(read_log(tmp_path / "log", (text % (line + "\\n")).encode()))
    at_ns = BASE_NS + 250 * MS - OFFSET_NS
    assert news.times["scheduled_ns"] == Moment(at_ns, at_ns + 10 * MS - 1)


def test_the_wall_clock_was_set_while_the_log_was_written(tmp_path: Path) -> None:
    """A minute back at second 100: a stamp that both sides showed spans both."""
    samples = [ClockSample(0, OFFSET_NS, 0), ClockSample(99 * SECOND_NS, OFFSET_NS, 0)]
    samples.append(ClockSample(101 * SECOND_NS, OFFSET_NS - 60 * SECOND_NS, 0))
    clock = WallClock(lambda: samples.pop(0))
    clock.look()
    clock.look()
    path = tmp_path / "engine.log"

    def at(seconds: int) -> str:
        when = datetime.fromtimestamp(OFFSET_NS // SECOND_NS + seconds, UTC)
        return f"[{when:%Y-%m-%d %H:%M:%S},000] "

    path.write_bytes(b"".join(hit("a", prefix=at(seconds)) for seconds in (10, 70, 200)))
    feed = LogFeed(str(path), LINES, now=lambda: 1 << 62)
    only_old, both, only_new = (n.times["scheduled_ns"] for n in requests(feed.poll(clock)))
    assert only_old == Moment(10 * SECOND_NS, 10 * SECOND_NS + MS - 1)
    assert both == Moment(70 * SECOND_NS, 130 * SECOND_NS + MS - 1)
    assert only_new == Moment(260 * SECOND_NS, 260 * SECOND_NS + MS - 1)
    feed.close(clock)
