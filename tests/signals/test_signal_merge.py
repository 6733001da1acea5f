"""One row a request, whoever spoke of it, under whichever id and in whichever order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import RequestNews, SignalBatch
from kvprobe.clock import ClockSample, Moment, WallClock
from kvprobe.model import EngineFacts
from kvprobe.schema import REQUESTS, UNKNOWN
from kvprobe.signals import Feed, FeedBatch, merge
from kvprobe.signals.combined import CombinedSignal, together_with
from kvprobe.signals.merge import (
    AFTER_FINISH_NS,
    AFTER_LAST_WORD_NS,
    AFTER_SILENCE_NS,
    SECOND_NS,
    RequestMerger,
)

MS = 1_000_000
OUTER, INNER = "cmpl-a-0", "cmpl-a-0-bb3b4d3f"
T0 = 1009 * SECOND_NS


def point(ns: int, width_ns: int = 0) -> Moment:
    return Moment(T0 + ns, T0 + ns + width_ns)


def rows_of(*news: RequestNews, last_word: bool = False) -> list[dict[str, Any]]:
    merger = RequestMerger()
    for one in news:
        merger.take(one, T0, last_word)
    return merger.release(T0, everything=True)[0]


LIFE = (
    RequestNews(OUTER, {"arrival_ns": point(0, SECOND_NS)}),
    RequestNews(INNER, {"scheduled_ns": point(7 * MS, MS)}, internal=True),
    RequestNews(INNER, tokens={"offload_hit_tokens": 896, "device_hit_tokens": 16}, internal=True),
    RequestNews(INNER, keys=("k1", "k2"), internal=True),
    RequestNews(
        OUTER,
        {
            "arrival_ns": point(3 * MS, 10),
            "prefill_start_ns": point(40 * MS),
            "prefill_end_ns": point(90 * MS),
            "first_token_ns": point(90 * MS),
        },
        {"prompt_tokens": 1009},
        finished=True,
    ),
)
LIFE_ROW = {
    "id": OUTER,
    "arrival_ns": T0 + 3 * MS + 5,
    "scheduled_ns": T0 + 7 * MS + MS // 2,
    "prefill_start_ns": T0 + 40 * MS,
    "prefill_end_ns": T0 + 90 * MS,
    "first_token_ns": T0 + 90 * MS,
    "prompt_tokens": 1009,
    "device_hit_tokens": 16,
    "storage_hit_tokens": UNKNOWN,
    "computed_tokens": 97,
    "host_hit_tokens": UNKNOWN,
    "offload_hit_tokens": 896,
    "uncertainty_ns": MS // 2,
}


@given(st.permutations(LIFE))
def test_any_order_gives_the_same_row(news: Sequence[RequestNews]) -> None:
    merger = RequestMerger()
    for one in news:
        merger.take(one, T0, last_word=False)
    rows, keys = merger.release(T0, everything=True)
    assert rows == [LIFE_ROW]
    assert set(rows[0]) == {column.name for column in REQUESTS.columns}
    assert keys == [
        {"request_id": OUTER, "position": 0, "key": "k1"},
        {"request_id": OUTER, "position": 1, "key": "k2"},
    ]
    assert merger.late == 0


@given(st.data())
def test_any_order_of_many_requests_of_many_times(data: st.DataObject) -> None:
    """Several moments for the same column, equally wide ones among them."""
    columns = st.sampled_from(["arrival_ns", "scheduled_ns", "first_token_ns"])
    moments = st.builds(point, st.integers(0, 900), st.sampled_from([0, 7, 7, 100]))
    news = data.draw(
        st.lists(
            st.builds(
                lambda name, internal, column, moment: RequestNews(
                    name + "-0123abcd" * internal, {column: moment}, internal=internal
                ),
                st.sampled_from(["a", "b", "c"]),
                st.booleans(),
                columns,
                moments,
            ),
            max_size=12,
        )
    )

    def told(messages: Sequence[RequestNews]) -> list[dict[str, Any]]:
        return sorted(rows_of(*messages), key=lambda row: str(row["id"]))

    assert told(news) == told(data.draw(st.permutations(news)))


# ---------------------------------------------------------------- ids


def test_an_internal_id_alone_is_a_row() -> None:
    (row,) = rows_of(LIFE[1])
    assert row["id"] == INNER


def test_an_id_used_again_while_the_first_is_open() -> None:
    """Names go to the requests in their order."""
    other = INNER[:-8] + "00000000"
    rows = rows_of(
        RequestNews(OUTER, {"arrival_ns": point(0)}),
        RequestNews(INNER, tokens={"offload_hit_tokens": 1}, internal=True),
        RequestNews(OUTER, {"first_token_ns": point(5)}, finished=True),
        RequestNews(other, tokens={"offload_hit_tokens": 2}, internal=True),
        RequestNews(OUTER, {"first_token_ns": point(50)}),
    )
    assert [(r["offload_hit_tokens"], r["first_token_ns"]) for r in rows] == [
        (1, T0 + 5),
        (2, T0 + 50),
    ]
    assert [row["id"] for row in rows] == [OUTER, OUTER]


def test_an_id_used_again_after_the_first_has_ended() -> None:
    """By its arrival, before anything internal is heard; the first's late news are its own."""
    later = 3 * SECOND_NS
    rows = rows_of(
        RequestNews(OUTER, {"arrival_ns": point(0), "first_token_ns": point(5)}, finished=True),
        RequestNews(OUTER, {"arrival_ns": point(later)}),
        RequestNews(INNER, tokens={"offload_hit_tokens": 2}, internal=True),
    )
    assert [row["arrival_ns"] for row in rows] == [T0, T0 + later]
    late = rows_of(
        RequestNews(OUTER, {"arrival_ns": point(0)}, finished=True),
        RequestNews(OUTER, {"arrival_ns": point(0), "first_token_ns": point(later)}),
    )
    assert [(row["arrival_ns"], row["first_token_ns"]) for row in late] == [(T0, T0 + later)]


def test_an_id_used_again_after_the_row_was_handed_out() -> None:
    merger = RequestMerger()
    first = {"arrival_ns": point(0), "first_token_ns": point(5)}
    merger.take(RequestNews(OUTER, first, finished=True), T0, False)
    assert len(merger.release(T0 + AFTER_FINISH_NS)[0]) == 1
    merger.take(RequestNews(OUTER, {"arrival_ns": point(1)}), T0, False)
    merger.take(RequestNews(OUTER, tokens={"prompt_tokens": 7}), T0, False)
    assert merger.late == 2
    merger.take(RequestNews(OUTER, {"arrival_ns": point(9 * SECOND_NS)}), T0, False)
    merger.take(RequestNews(OUTER, tokens={"prompt_tokens": 1009}), T0, False)
    (row,), _ = merger.release(T0, everything=True)
    assert (row["arrival_ns"], row["prompt_tokens"]) == (T0 + 9 * SECOND_NS, 1009)
    assert merger.late == 2


def test_internal_news_of_a_request_that_was_handed_out() -> None:
    """They would be a row of their own without any other time."""
    merger = RequestMerger()
    merger.take(RequestNews(OUTER, {"arrival_ns": point(0)}, finished=True), T0, True)
    assert len(merger.release(T0 + AFTER_LAST_WORD_NS)[0]) == 1
    merger.take(RequestNews(INNER, tokens={"offload_hit_tokens": 7}, internal=True), T0, False)
    merger.take(RequestNews(INNER, {"scheduled_ns": point(4)}, internal=True), T0, False)
    assert merger.late == 2
    later = RequestNews(INNER, {"scheduled_ns": point(5 * SECOND_NS)}, internal=True)
    merger.take(later, T0, False)
    assert [row["id"] for row in merger.release(T0, everything=True)[0]] == [INNER]


def test_an_engine_that_asks_for_a_prompt_several_times_over() -> None:
    """Two internal ids of one outer id, both open: two rows, the second under its own name."""
    other = INNER[:-8] + "00000000"
    rows = rows_of(
        RequestNews(OUTER, {"arrival_ns": point(0)}),
        RequestNews(INNER, internal=True),
        RequestNews(other, internal=True),
    )
    assert [row["id"] for row in rows] == [OUTER, other]


@pytest.mark.parametrize("name", ["", "x" * 513])
def test_ids_that_are_none(name: str) -> None:
    assert rows_of(RequestNews(name, {"arrival_ns": point(0)})) == []


# ---------------------------------------------------------------- times


def test_the_narrower_time_wins_whatever_came_first() -> None:
    wide, narrow = point(0, SECOND_NS), point(700 * MS, 10)
    for moments in ((wide, narrow), (narrow, wide)):
        (row,) = rows_of(*(RequestNews("a", {"arrival_ns": m}) for m in moments))
        assert (row["arrival_ns"], row["uncertainty_ns"]) == (narrow.middle_ns, 5)


def test_times_are_narrowed_by_their_order() -> None:
    """An arrival of some time in a second is before the first token of 200 ms past it."""
    (row,) = rows_of(
        RequestNews("a", {"arrival_ns": point(0, SECOND_NS), "first_token_ns": point(200 * MS)})
    )
    assert row["arrival_ns"] == T0 + 100 * MS
    assert row["uncertainty_ns"] == 100 * MS
    (row,) = rows_of(
        RequestNews("a", {"arrival_ns": point(900 * MS), "scheduled_ns": point(0, SECOND_NS)})
    )
    assert (row["arrival_ns"], row["scheduled_ns"]) == (T0 + 900 * MS, T0 + 950 * MS)


def test_times_that_contradict_their_order_stay() -> None:
    (row,) = rows_of(RequestNews("a", {"arrival_ns": point(10), "first_token_ns": point(3)}))
    assert (row["arrival_ns"], row["first_token_ns"]) == (T0 + 10, T0 + 3)


def test_a_request_from_before_the_machine_was_started_has_no_row() -> None:
    """As an old log has it; its time would be negative, which means unknown."""
    old = RequestNews("old", {"arrival_ns": Moment(-9 * SECOND_NS, -8 * SECOND_NS)}, keys=("k",))
    merger = RequestMerger()
    merger.take(old, T0, False)
    merger.take(RequestNews("untimed", tokens={"prompt_tokens": 7}), T0, False)
    rows, keys = merger.release(T0, everything=True)
    assert ([row["id"] for row in rows], keys) == (["untimed"], [])


# ---------------------------------------------------------------- when a row is handed out


@pytest.mark.parametrize(
    ("finished", "last_word", "wait_ns"),
    [
        (True, True, AFTER_LAST_WORD_NS),
        (True, False, AFTER_FINISH_NS),
        (False, False, AFTER_SILENCE_NS),
    ],
)
def test_a_row_waits_for_what_others_may_say(finished: bool, last_word: bool, wait_ns: int) -> None:
    merger = RequestMerger()
    merger.take(RequestNews("a", finished=finished), T0, last_word)
    assert merger.release(T0 + wait_ns - 1) == ([], [])
    rows, _ = merger.release(T0 + wait_ns + merge.LOOK_NS)
    assert [row["id"] for row in rows] == ["a"]
    assert merger.release(T0 + 2 * AFTER_SILENCE_NS) == ([], [])


def test_news_put_off_the_silence_but_not_the_end() -> None:
    merger = RequestMerger()
    merger.take(RequestNews("a"), T0, False)
    merger.take(RequestNews("a"), T0 + AFTER_SILENCE_NS // 2, False)
    assert not merger.release(T0 + AFTER_SILENCE_NS)[0]
    merger.take(RequestNews("a", finished=True), T0 + AFTER_SILENCE_NS, False)
    merger.take(RequestNews("a"), T0 + AFTER_SILENCE_NS + AFTER_FINISH_NS - 1, False)
    merger.take(RequestNews("a", finished=True), T0 + AFTER_SILENCE_NS + AFTER_FINISH_NS - 1, False)
    assert len(merger.release(T0 + AFTER_SILENCE_NS + AFTER_FINISH_NS)[0]) == 1


def test_of_too_many_open_requests_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MOST_OPEN", 101)
    merger = RequestMerger()
    for number in range(1009):
        merger.take(RequestNews(f"r{number}"), T0, False)
    rows, _ = merger.release(T0 + SECOND_NS)
    assert [row["id"] for row in rows] == [f"r{number}" for number in range(1009 - 101)]
    assert len(merger._gone) == 2 * 101
    merger.release(T0, everything=True)
    assert (len(merger._open), len(merger._named), len(merger._unnamed)) == (0, 0, 0)


def test_nothing_is_left_of_internal_ids() -> None:
    merger = RequestMerger()
    for number in range(1009):
        merger.take(RequestNews(f"r{number}-0123abcd", internal=True), T0, False)
        if number % 2:
            merger.take(RequestNews(f"r{number}"), T0, False)
    assert len(merger.release(T0, everything=True)[0]) == 1009
    assert (len(merger._open), len(merger._named), len(merger._unnamed)) == (0, 0, 0)


# ---------------------------------------------------------------- feeds together


class Scripted:
    """A feed that says what it is told to."""

    def __init__(self, name: str, *batches: FeedBatch, last_word: bool = False) -> None:
        self.name, self.last_word = name, last_word
        self._batches = list(batches)
        self.steps: list[int] = []

    def poll(self, clock: WallClock) -> FeedBatch:
        self.steps.append(clock.steps)
        return self._batches.pop(0) if self._batches else FeedBatch()

    def close(self, clock: WallClock) -> FeedBatch:
        return self.poll(clock)


class Whole:
    def poll(self) -> SignalBatch:
        return SignalBatch([{"id": "whole"}], [{"request_id": "whole"}], None, 3, 1)

    end = close = poll


def test_feeds_and_whole_signals_together() -> None:
    log = Scripted("log:x", FeedBatch([LIFE[1], LIFE[0]], understood=2, ignored=5))
    spans = Scripted(
        "otlp:1",
        FeedBatch([LIFE[4]], [{"metric": "m"}], 1, 0, 7, ["one was dropped"]),
        last_word=True,
    )
    feeds: list[Feed] = [log, spans]
    signal = CombinedSignal(feeds, [Whole()], now=lambda: T0)
    polled = signal.poll()
    assert list(polled.requests) == [{"id": "whole"}]
    assert (polled.understood, polled.ignored) == (6, 6)
    assert list(polled.counters) == [{"metric": "m"}]
    closed = signal.close()
    assert [row["id"] for row in closed.requests] == [OUTER, "whole"]
    assert closed.requests[0]["first_token_ns"] == T0 + 90 * MS
    assert dict(signal.understood) == {"log:x": 2, "otlp:1": 1}
    assert (signal.ignored["log:x"], signal.lost["otlp:1"]) == (5, 7)
    assert signal.notes == ["one was dropped"]
    assert signal.close() == SignalBatch()


def test_the_clocks_are_looked_at_before_they_are_used() -> None:
    """A clock that was set between two polls: what the second brings is read by the new one."""
    offset_ns, now_ns = 1000, T0
    clock = WallClock(lambda: ClockSample(now_ns, offset_ns, 0))
    feed = Scripted("log:x")
    signal = CombinedSignal([feed], clock=clock, now=lambda: now_ns)
    now_ns += SECOND_NS
    signal.poll()
    now_ns, offset_ns = now_ns + SECOND_NS // 10, offset_ns + 60 * SECOND_NS
    signal.poll()
    assert feed.steps == [0, 1]


def test_facts_are_told_when_they_change() -> None:
    vllm = EngineFacts("vllm", model="m", unit_tokens=16)
    lmcache = EngineFacts("lmcache", unit_tokens=256, unit_bytes=1 << 20)
    feed = Scripted("a", *(FeedBatch([facts]) for facts in (vllm, lmcache, vllm, lmcache, vllm)))
    signal = CombinedSignal([feed])
    told = [signal.poll().engine for _ in range(5)]
    both = EngineFacts("lmcache", model="m", unit_tokens=256, unit_bytes=1 << 20)
    assert told == [vllm, both, None, None, None]


def test_facts_of_two_engines() -> None:
    vllm, lmcache = EngineFacts("vllm", model="m"), EngineFacts("lmcache", unit_tokens=256)
    both = EngineFacts("lmcache", model="m", unit_tokens=256)
    assert together_with(None, vllm) == vllm
    assert together_with(vllm, lmcache) == together_with(lmcache, vllm) == both
    newer = EngineFacts("lmcache", unit_tokens=512)
    assert together_with(both, newer) == EngineFacts("lmcache", model="m", unit_tokens=512)


def test_an_engine_that_names_itself_in_our_own_format_is_the_one_that_is_meant() -> None:
    """Its files may follow the scheme of another one, which knows as much of them."""
    stored = EngineFacts("vllm", model="m", unit_tokens=16, unit_bytes=1 << 16, root="/kv")
    own = EngineFacts("kvprobe-workload", unit_tokens=16, unit_bytes=1 << 16)
    for said in (own, EngineFacts("gateway")):
        whole = Whole()
        whole.poll = lambda said=said: SignalBatch(engine=said)  # type: ignore[method-assign,misc]
        assert CombinedSignal([], [whole], facts=stored).poll().engine == said
    same = Whole()
    same.poll = lambda: SignalBatch(engine=EngineFacts("vllm", unit_tokens=32))  # type: ignore[method-assign]
    told = CombinedSignal([], [same], facts=stored).poll().engine
    assert told == EngineFacts("vllm", model="m", unit_tokens=32, unit_bytes=1 << 16, root="/kv")


def test_a_vague_time_is_left_out_of_a_sharp_row() -> None:
    """Less than a tenth of the time to first token is sharp; without both ends nothing is vague."""
    ends = {"arrival_ns": point(0), "first_token_ns": point(1000 * MS)}
    inside = RequestNews("a", ends | {"scheduled_ns": point(300 * MS, 200 * MS)})
    vague = RequestNews("b", ends | {"scheduled_ns": point(300 * MS, 200 * MS + 2)})
    alone = RequestNews("c", {"arrival_ns": point(0), "scheduled_ns": point(300 * MS, 900 * MS)})
    rows = rows_of(inside, vague, alone)
    assert [row["scheduled_ns"] for row in rows] == [T0 + 400 * MS, UNKNOWN, T0 + 750 * MS]
    assert [row["uncertainty_ns"] for row in rows] == [100 * MS, 0, 450 * MS]


def test_rows_are_looked_for_a_few_times_a_second() -> None:
    merger = RequestMerger()
    assert merger.release(T0) == ([], [])
    merger.take(RequestNews("a", finished=True), T0 - AFTER_FINISH_NS, last_word=False)
    assert merger.release(T0 + merge.LOOK_NS - 1)[0] == []
    assert len(merger.release(T0 + merge.LOOK_NS)[0]) == 1


def test_who_has_the_last_word_is_heard_after_the_end() -> None:
    log = Scripted("log:x", FeedBatch([LIFE[0]], understood=1))
    spans = Scripted("otlp:1", FeedBatch([LIFE[4]], understood=1), last_word=True)
    feeds: list[Feed] = [log, spans]
    signal = CombinedSignal(feeds, now=lambda: T0)
    assert (signal.end().understood, len(log.steps), len(spans.steps)) == (1, 1, 0)
    (row,) = signal.close().requests
    assert row["first_token_ns"] == T0 + 90 * MS
    assert (len(log.steps), len(spans.steps)) == (1, 1)
