"""Hits that an engine counts in files become tokens, or stay unknown."""

from __future__ import annotations

import pytest

from kvprobe.adapter import News, RequestNews, SignalBatch
from kvprobe.clock import WallClock
from kvprobe.model import EngineFacts
from kvprobe.schema import UNKNOWN
from kvprobe.signals import FeedBatch
from kvprobe.signals.combined import CombinedSignal
from kvprobe.signals.merge import RequestMerger

UNIT_TOKENS = 131
HIT, HOST, STORAGE = "offload_hit_tokens", "host_hit_tokens", "storage_hit_tokens"


def row(*news: RequestNews, unit_tokens: int | None = UNIT_TOKENS) -> dict[str, int]:
    merger = RequestMerger()
    for each in news:
        merger.take(each, 1, last_word=False)
    rows, _ = merger.release(2, everything=True, unit_tokens=unit_tokens)
    assert len(rows) == 1
    return rows[0]


def hits(host: int, storage: int, of: int) -> RequestNews:
    return RequestNews("r", units={HOST: host, STORAGE: storage}, of_units=of)


def prompt(tokens: int) -> RequestNews:
    return RequestNews("r", tokens={"prompt_tokens": tokens})


def keys(count: int) -> RequestNews:
    return RequestNews("r", keys=tuple(f"{n:016x}" for n in range(count)))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("whole", [prompt(7 * UNIT_TOKENS + 130), keys(7)])
def test_files_of_all_ranks_are_one_unit(ranks: int, whole: RequestNews) -> None:
    for order in (
        [whole, hits(2 * ranks, 3 * ranks, 7 * ranks)],
        [hits(2 * ranks, 3 * ranks, 7 * ranks), whole],
    ):
        found = row(*order)
        assert (found[HOST], found[STORAGE]) == (2 * UNIT_TOKENS, 3 * UNIT_TOKENS)


def test_the_rest_of_the_prompt_was_computed() -> None:
    device = RequestNews("r", tokens={"device_hit_tokens": 0})
    found = row(prompt(7 * UNIT_TOKENS + 13), device, hits(2, 3, 7))
    assert found["computed_tokens"] == 2 * UNIT_TOKENS + 13


def test_what_is_said_in_tokens_goes_before() -> None:
    exact = RequestNews("r", tokens={STORAGE: 389})
    assert row(exact, prompt(917), hits(2, 3, 7))[STORAGE] == 389
    assert row(hits(2, 3, 7), prompt(917), exact)[STORAGE] == 389


@pytest.mark.parametrize(
    ("news", "unit_tokens"),
    [
        ([hits(2, 3, 7)], UNIT_TOKENS),  # length of the prompt unknown
        ([hits(2, 3, 7), prompt(917)], None),  # length of a unit unknown
        ([hits(2, 3, 7), prompt(5 * UNIT_TOKENS)], UNIT_TOKENS),  # 7 are not whole ranks of 5
        ([hits(2, 3, 7), prompt(14 * UNIT_TOKENS)], UNIT_TOKENS),  # fewer files than units
        ([hits(8, 9, 7), prompt(7 * UNIT_TOKENS)], UNIT_TOKENS),  # more hits than files
        ([hits(2, 3, 0), prompt(7 * UNIT_TOKENS)], UNIT_TOKENS),
        ([hits(-2, -3, 7), prompt(7 * UNIT_TOKENS)], UNIT_TOKENS),
        ([hits(2, 3, 7), prompt(UNIT_TOKENS - 1)], UNIT_TOKENS),
    ],
)
def test_no_guesses(news: list[RequestNews], unit_tokens: int | None) -> None:
    found = row(*news, unit_tokens=unit_tokens)
    assert (found[HOST], found[STORAGE]) == (UNKNOWN, UNKNOWN)


def test_none_is_none_of_any_size() -> None:
    found = row(hits(0, 0, 7), unit_tokens=None)
    assert (found[HOST], found[STORAGE], found[HIT]) == (0, 0, UNKNOWN)


class OneBatch:
    """A feed that has one batch to give."""

    name, last_word = "test", False

    def __init__(self, batch: FeedBatch) -> None:
        self._batches = [batch]

    def poll(self, clock: WallClock) -> FeedBatch:
        return self._batches.pop() if self._batches else FeedBatch()

    close = poll


def close(*news: News) -> SignalBatch:
    return CombinedSignal([OneBatch(FeedBatch(news))]).close()


def test_the_engine_says_how_long_a_unit_is() -> None:
    facts: News = EngineFacts("lmcache", unit_tokens=257)
    orders: list[list[News]] = [[facts, hits(1, 4, 5), keys(5)], [hits(1, 4, 5), keys(5), facts]]
    for order in orders:
        (found,) = close(*order).requests
        assert (found[HOST], found[STORAGE]) == (257, 4 * 257)
    (found,) = close(EngineFacts("lmcache"), hits(1, 4, 5), keys(5)).requests
    assert found[HOST] == UNKNOWN
