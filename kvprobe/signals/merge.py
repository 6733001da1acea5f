"""One row a request from what several signals say of it.

Signals name a request by the client's id or by the engine's own, which has a random suffix; they
know some of its times and token counts, each as well as it can; and they come at different times:
a log at once, spans in batches seconds later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from kvprobe.adapter import RequestNews
from kvprobe.clock import Moment
from kvprobe.schema import REQUESTS, UNKNOWN

SECOND_NS = 1_000_000_000
AFTER_LAST_WORD_NS = 2 * SECOND_NS
"""How long others are waited for once the feed that speaks last has said that a request is over."""
AFTER_FINISH_NS = 10 * SECOND_NS
"""The same for other feeds: span exporters send every 5 s unless told otherwise."""
AFTER_SILENCE_NS = 300 * SECOND_NS
"""A request of which nothing more is heard; a long prompt may be prefilled for minutes."""
BLUR = 0.1
"""Doubt about a time, as a share of the time to first token, beyond which it says too little."""
APART_NS = SECOND_NS
"""An arrival so much later than all that is known of a request is of another with the same id."""
MOST_OPEN = 100_000
LOOK_NS = SECOND_NS // 4
SUFFIX_CHARS = 9
"""``-`` and 8 random hex digits."""
MOST_ID_CHARS = 512
_MOST = 1 << 62
"""Times and counts beyond it are nonsense, and no table holds them."""
_ORDER = ("arrival_ns", "scheduled_ns", "prefill_start_ns", "prefill_end_ns", "first_token_ns")


@dataclass(eq=False)
class _Request:
    """What is known of one request. ``names`` are the ids it was called by."""

    id: str
    due_ns: int
    outer: bool = False
    inner: bool = False
    ended: bool = False
    names: list[str] = field(default_factory=list)
    times: dict[str, Moment] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def take(self, news: RequestNews) -> None:
        for column, moment in news.times.items():
            possible = moment.earliest_ns > -_MOST and moment.latest_ns < _MOST
            if possible and _is_better(column, moment, self.times.get(column)):
                self.times[column] = moment
        self.tokens.update({n: count for n, count in news.tokens.items() if 0 <= count < _MOST})
        self.units.update({name: (count, news.of_units) for name, count in news.units.items()})
        self.keys = news.keys or self.keys
        if not news.internal:
            self.id = news.id

    def row(self, unit_tokens: int | None) -> dict[str, Any]:
        row: dict[str, Any] = {c.name: UNKNOWN for c in REQUESTS.columns} | {"id": self.id}
        times = _in_order(self._sharp_times())
        row |= {column: moment.middle_ns for column, moment in times.items()}
        row |= self._units_in_tokens(unit_tokens) | self.tokens
        row["uncertainty_ns"] = max((m.uncertainty_ns for m in times.values()), default=UNKNOWN)
        if row["computed_tokens"] == UNKNOWN:
            row["computed_tokens"] = _computed(row)
        return row

    def _sharp_times(self) -> dict[str, Moment]:
        """The times without those that would blur the others.

        The second in which a log line was written adds nothing to a request whose arrival and
        first token are known to the microsecond.
        """
        arrival, first = self.times.get("arrival_ns"), self.times.get("first_token_ns")
        if arrival is None or first is None:
            return self.times
        doubt = max(arrival.uncertainty_ns, first.uncertainty_ns)
        most = max(doubt, int(BLUR * (first.middle_ns - arrival.middle_ns)))
        return {name: m for name, m in self.times.items() if m.uncertainty_ns <= most}

    def _units_in_tokens(self, unit_tokens: int | None) -> dict[str, int]:
        """Hits that were counted in files; only those that can be tokens without a guess."""
        told = {name: 0 for name, (count, _) in self.units.items() if not count}
        if unit_tokens:
            whole = len(self.keys) or self.tokens.get("prompt_tokens", 0) // unit_tokens
            for name, (count, of) in self.units.items():
                if whole and of >= whole and of % whole == 0 and 0 < count <= of:
                    told[name] = count * unit_tokens // (of // whole)
        return told

    @property
    def last_ns(self) -> int | None:
        """The latest that is known of it."""
        return max((moment.latest_ns for moment in self.times.values()), default=None)

    def key_rows(self) -> list[dict[str, Any]]:
        return [
            {"request_id": self.id, "position": place, "key": key}
            for place, key in enumerate(self.keys)
        ]


def _in_order(times: dict[str, Moment]) -> dict[str, Moment]:
    """The times narrowed by the order in which they come; as they are where they contradict it.

    A log's whole second says of an arrival that it was before the first token.
    """
    known = [column for column in _ORDER if column in times]
    earliest = [times[column].earliest_ns for column in known]
    latest = [times[column].latest_ns for column in known]
    earliest = list(accumulate(earliest, max))
    latest = list(accumulate(reversed(latest), min))[::-1]
    if any(low > high for low, high in zip(earliest, latest, strict=True)):
        return times
    narrowed = map(Moment, earliest, latest)
    return {**times, **dict(zip(known, narrowed, strict=True))}


def _used_again(news: RequestNews, last_ns: int | None) -> bool:
    """Whether another request has the same id: it arrives when all of the known one is over."""
    arrival = news.times.get("arrival_ns")
    return arrival is not None and last_ns is not None and arrival.earliest_ns > last_ns + APART_NS


def _is_better(column: str, moment: Moment, known: Moment | None) -> bool:
    """Whether a time replaces what is known, in whichever order the two came."""
    if known is None:
        return True
    if column == "scheduled_ns":  # an engine may say so at every look at a request that waits
        return (moment.latest_ns, -moment.earliest_ns) < (known.latest_ns, -known.earliest_ns)
    return (moment.uncertainty_ns, moment) < (known.uncertainty_ns, known)


def _computed(row: dict[str, Any]) -> int:
    """The rest of the prompt, where all that was found is known."""
    found = row["offload_hit_tokens"]
    if found == UNKNOWN:
        found = row["storage_hit_tokens"]
        if found != UNKNOWN:
            found += max(row["host_hit_tokens"], 0)
    if UNKNOWN in (row["prompt_tokens"], row["device_hit_tokens"], found):
        return UNKNOWN
    return max(int(row["prompt_tokens"] - row["device_hit_tokens"] - found), 0)


class _Gone(NamedTuple):
    """A request whose row was handed out: the latest known of it, and whether by its inner id."""

    last_ns: int | None
    inner: bool


class RequestMerger:
    """Takes news in any order; hands each request's row out once, when no more is expected.

    An internal id belongs to the client's id that it is made from. Where a client uses an id again
    while the first request is open, its names go to the requests in their order.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[_Request, None] = OrderedDict()
        self._named: dict[str, _Request] = {}
        self._unnamed: dict[str, deque[_Request]] = {}
        self._gone: OrderedDict[str, _Gone] = OrderedDict()
        self._looked_ns = 0
        self.late = 0
        """Messages on requests whose row was handed out before."""

    def take(self, news: RequestNews, now_ns: int, last_word: bool) -> None:
        """Add what one message says; ``now_ns`` is CLOCK_MONOTONIC."""
        if not 0 < len(news.id) <= MOST_ID_CHARS:
            return
        request = self._request_of(news)
        if request is None:
            if self._is_late(news):
                self.late += 1
                return
            request = self._new(news, now_ns)
        if news.id not in request.names:
            request.names.append(news.id)
        self._named[news.id] = request
        request.inner |= news.internal
        request.outer |= not news.internal
        request.take(news)
        if news.finished:
            wait_ns = AFTER_LAST_WORD_NS if last_word else AFTER_FINISH_NS
            ended = min(request.due_ns, now_ns + wait_ns) if request.ended else now_ns + wait_ns
            request.due_ns, request.ended = ended, True
        elif not request.ended:
            request.due_ns = now_ns + AFTER_SILENCE_NS

    def release(
        self, now_ns: int, everything: bool = False, unit_tokens: int | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of ``requests`` and of ``keys`` that will not change any more.

        Requests of before this machine was started, as old logs have them, have no row.
        ``unit_tokens``: tokens in one unit of the engine, by which hits in files become tokens.
        """
        if not everything and now_ns - self._looked_ns < LOOK_NS:
            return [], []
        self._looked_ns = now_ns
        over = len(self._open) - MOST_OPEN
        due = [
            request
            for place, request in enumerate(self._open)
            if everything or request.due_ns <= now_ns or place < over
        ]
        for request in due:
            self._close(request)
        told = [request for request in due if (request.last_ns is None or request.last_ns > 0)]
        return [r.row(unit_tokens) for r in told], [row for r in told for row in r.key_rows()]

    def _request_of(self, news: RequestNews) -> _Request | None:
        """The open request that the news are of."""
        known = self._named.get(news.id)
        if known is None:
            return self._other(news)
        if not known.ended:  # clocks of who speaks may differ: no time is held against it
            return known
        if _used_again(news, known.last_ns):
            return self._other(news)
        if news.internal or "arrival_ns" in news.times:
            return known
        return self._other(news) or known

    def _is_late(self, news: RequestNews) -> bool:
        """Whether the row of the request was handed out."""
        if news.id in self._gone:
            return not _used_again(news, self._gone[news.id].last_ns)
        outer = self._gone.get(news.id[:-SUFFIX_CHARS]) if news.internal else None
        if outer is None or outer.inner:
            return False
        first_ns = min((moment.earliest_ns for moment in news.times.values()), default=0)
        return first_ns <= (outer.last_ns or 0) + APART_NS

    def _new(self, news: RequestNews, now_ns: int) -> _Request:
        request = _Request(news.id, now_ns + AFTER_SILENCE_NS)
        self._open[request] = None
        if news.internal:
            self._unnamed.setdefault(news.id[:-SUFFIX_CHARS], deque()).append(request)
        return request

    def _other(self, news: RequestNews) -> _Request | None:
        """The open request that is known by the other kind of id only."""
        if news.internal:
            outer = self._named.get(news.id[:-SUFFIX_CHARS])
            return None if outer is None or outer.inner else outer
        waiting = self._unnamed.get(news.id)
        found = waiting.popleft() if waiting else None
        if waiting is not None and not waiting:
            del self._unnamed[news.id]
        return found

    def _close(self, request: _Request) -> None:
        del self._open[request]
        for name in request.names:
            if self._named.get(name) is request:
                del self._named[name]
            self._gone.pop(name, None)
            self._gone[name] = _Gone(request.last_ns, request.inner)
        if not request.outer:
            stem = request.id[:-SUFFIX_CHARS]
            waiting = self._unnamed.get(stem)
            if waiting is not None and request in waiting:
                waiting.remove(request)
                if not waiting:
                    del self._unnamed[stem]
        while len(self._gone) > 2 * MOST_OPEN:
            self._gone.popitem(last=False)
