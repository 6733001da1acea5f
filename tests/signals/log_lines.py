"""Small kinds of line for tests of the feeds that read text."""

from __future__ import annotations

import re
from pathlib import Path

from kvprobe.adapter import LogLine, News, RequestNews
from kvprobe.clock import ClockSample, Moment, WallClock
from kvprobe.signals import Feed, FeedBatch
from kvprobe.signals.log import LogFeed

SECOND_NS = 1_000_000_000
OFFSET_NS = 1_700_000_000 * SECOND_NS
"""Wall clock minus CLOCK_MONOTONIC of ``steady_clock``."""


def _hit(match: re.Match[str], when: Moment | None) -> News:
    times = {} if when is None else {"scheduled_ns": when}
    return RequestNews(match[1], times, {"offload_hit_tokens": int(match[2])})


def _arrival(match: re.Match[str], when: Moment | None) -> News | None:
    return None if when is None else RequestNews(match[1], {"arrival_ns": when})


HIT = LogLine(
    "hit",
    " offloaded tokens after ",
    re.compile(r"Request (\S{1,64}) hit (\d+) offloaded tokens after \d+ GPU hit tokens"),
    _hit,
)
ARRIVAL = LogLine("arrival", "Received request ", re.compile(r"Received request (\S+):"), _arrival)
LOADED = LogLine("loaded", "loaded=", re.compile(r"prefetch req=(\S+) loaded=(\d+)"), _hit)
LINES = (HIT, ARRIVAL, LOADED)
PREFIX = "(EngineCore pid=27411) DEBUG 12-01 17:20:23 [offloading/scheduler.py:945] "


def hit(name: str, tokens: int = 896, prefix: str = PREFIX) -> bytes:
    text = f"{prefix}Request {name} hit {tokens} offloaded tokens after 0 GPU hit tokens\n"
    return text.encode()


def steady_clock(uncertainty_ns: int = 0) -> WallClock:
    return WallClock(lambda: ClockSample(SECOND_NS, OFFSET_NS, uncertainty_ns))


def requests(batch: FeedBatch) -> list[RequestNews]:
    return [news for news in batch.news if isinstance(news, RequestNews)]


def names(*batches: FeedBatch) -> list[str]:
    return [news.id for batch in batches for news in requests(batch)]


def heard(feed: Feed) -> FeedBatch:
    """All that a feed brings when it is polled until it is quiet, and then closed."""
    clock = steady_clock()
    batches = [feed.poll(clock)]
    while batches[-1].understood or batches[-1].ignored or batches[-1].lost:
        batches.append(feed.poll(clock))
    batches.append(feed.close(clock))
    return FeedBatch(
        [news for batch in batches for news in batch.news],
        understood=sum(batch.understood for batch in batches),
        ignored=sum(batch.ignored for batch in batches),
        lost=sum(batch.lost for batch in batches),
        notes=batches[-1].notes,
    )


def read_log(path: Path, data: bytes, lines: tuple[LogLine, ...] = LINES) -> FeedBatch:
    path.write_bytes(data)
    return heard(LogFeed(str(path), lines))
