"""All signals of a node as one ``Signal``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from kvprobe.adapter import Signal, SignalBatch
from kvprobe.clock import WallClock
from kvprobe.model import EngineFacts
from kvprobe.signals import Feed, FeedBatch
from kvprobe.signals.merge import RequestMerger

_LOOK_NS = 20_000_000
"""Between two looks at the clocks, which take some microseconds."""


class CombinedSignal:
    """Satisfies ``Signal``: feeds, whose news are merged, and signals that give whole rows.

    ``understood``, ``ignored`` and ``lost`` count messages for each feed by its name; ``notes`` are
    what feeds say of themselves. ``patience_s`` is how long ``close`` waits for the last word of
    engines that have been heard.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        whole: Sequence[Signal] = (),
        facts: EngineFacts | None = None,
        clock: WallClock | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._feeds, self._whole = feeds, whole
        self._engine = self._said = facts
        self._clock = clock or WallClock()
        self._now = now
        self._looked_ns = now()
        self._merger = RequestMerger()
        self.understood: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.notes: list[str] = []
        self.patience_s = 0.0
        self._closed = False

    def add(self, feed: Feed) -> None:
        """Listen to one more feed."""
        self._feeds = [*self._feeds, feed]
        self.understood[feed.name] += 0

    def know(self, facts: EngineFacts | None) -> None:
        """Take facts of the engine that did not come over a signal."""
        self._learn(facts)

    @property
    def late(self) -> int:
        """Messages that came after the row of their request was handed out."""
        return self._merger.late

    def poll(self) -> SignalBatch:
        """Return what is new; never blocks."""
        self._look()
        return self._batch(
            [(feed, feed.poll(self._clock)) for feed in self._feeds],
            [signal.poll() for signal in self._whole],
        )

    def end(self) -> SignalBatch:
        """Return what there is as the window ends; only feeds with the last word stay open."""
        self._look()
        early = [feed for feed in self._feeds if not feed.last_word]
        batch = self._batch(
            [(feed, feed.close(self._clock)) for feed in early],
            [signal.end() for signal in self._whole],
        )
        self._feeds = [feed for feed in self._feeds if feed.last_word]
        return batch

    def close(self) -> SignalBatch:
        """Return the rest, requests that never finished included; nothing the second time."""
        if self._closed:
            return SignalBatch()
        self._closed = True
        if any(feed.last_word and self.understood[feed.name] for feed in self._feeds):
            time.sleep(self.patience_s)
        self._look()
        return self._batch(
            [(feed, feed.close(self._clock)) for feed in self._feeds],
            [signal.close() for signal in self._whole],
            last=True,
        )

    def _look(self) -> None:
        """Look at the clocks before the feeds use them: a jump is older than what tells of it."""
        now_ns = self._now()
        if now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            self._clock.look()

    def _batch(
        self,
        heard: Sequence[tuple[Feed, FeedBatch]],
        whole: Sequence[SignalBatch],
        last: bool = False,
    ) -> SignalBatch:
        now_ns = self._now()
        for feed, news in heard:
            self._take(feed, news, now_ns)
        for batch in whole:
            self._learn(batch.engine, own_word=True)
        unit_tokens = self._engine.unit_tokens if self._engine else None
        requests, keys = self._merger.release(now_ns, last, unit_tokens)
        engine, self._said = self._said, None
        counters: list[Mapping[str, Any]] = [row for _, b in heard for row in b.counters]
        return SignalBatch(
            requests=[*requests, *(row for b in whole for row in b.requests)],
            keys=[*keys, *(row for b in whole for row in b.keys)],
            engine=engine,
            understood=sum(b.understood for _, b in heard) + sum(b.understood for b in whole),
            ignored=sum(b.ignored for _, b in heard) + sum(b.ignored for b in whole),
            counters=[*counters, *(row for b in whole for row in b.counters)],
        )

    def _take(self, feed: Feed, batch: FeedBatch, now_ns: int) -> None:
        self.understood[feed.name] += batch.understood
        self.ignored[feed.name] += batch.ignored
        self.lost[feed.name] += batch.lost
        self.notes += batch.notes
        for news in batch.news:
            if isinstance(news, EngineFacts):
                self._learn(news)
            else:
                self._merger.take(news, now_ns, feed.last_word)

    def _learn(self, facts: EngineFacts | None, own_word: bool = False) -> None:
        """Take facts; an engine that names itself in our own format is the one that is meant."""
        if facts is not None:
            stranger = self._engine is not None and self._engine.name != facts.name
            known = None if own_word and stranger else self._engine
            together = together_with(known, facts)
            if together != self._engine:
                self._engine = self._said = together


def together_with(known: EngineFacts | None, more: EngineFacts) -> EngineFacts:
    """Facts of one or two engines as one: the engine that owns the files has the last word.

    An inference engine and its cache server both speak, again and again; the one that knows more
    of the size of a unit is the one whose files are read. What it does not know the other tells.
    """
    if known is None:
        return more
    owner, other = more, known
    if known.name != more.name and 0 < _unit_facts(known) >= _unit_facts(more):
        owner, other = known, more
    missing = {
        f.name: getattr(other, f.name) for f in fields(owner) if getattr(owner, f.name) is None
    }
    return replace(owner, **missing)


def _unit_facts(facts: EngineFacts) -> int:
    return (facts.unit_tokens is not None) + (facts.unit_bytes is not None)
