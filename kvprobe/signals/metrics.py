"""An engine's Prometheus page, scraped once a second."""

from __future__ import annotations

import http.client
import math
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvprobe.adapter import Metrics, Sample
from kvprobe.clock import WallClock
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.signals import FeedBatch

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
LAST_TIMEOUT_S = 1.0
LONGEST_PAUSE_S = 8.0
"""Between attempts while the page cannot be had."""
MOST_BYTES = 16 << 20
MOST_LINE_CHARS = 16 << 10
MOST_SAMPLES = 10_000
"""Of those that an adapter wants, on one page; vLLM has some hundred."""
MOST_ROWS_WAITING = 200_000
_LOOK_S = 0.02
_ACCEPT = "text/plain; version=0.0.4"
_PIECE = 1 << 16
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_NOT_COUNTED = ("_bucket", "_created")
_STRANGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What parsers raise on text, and adapters on samples, that they do not understand."""


class MetricsFeed:
    """Counters of an engine as rows of ``host``, and what its page tells of the engine.

    Metric: the sample's name; subject: its labels, ``a=b,c=d`` in the order of their names; time:
    when the answer began to come. Samples that an adapter keeps, without NaN and without the
    ``_bucket`` and ``_created`` ones (which adapters do not see either). A row is made of a value
    that is new or changed since the last page, and of every value at the end: of the last page
    that came, whenever that was.

    ``understood`` counts pages; ``ignored`` lines that do not parse, and attempts that gave no
    page; ``lost`` rows that nobody polled for.

    Args:
        url: of the page; without a path it is ``/metrics``. Redirects are not followed.
        metrics: what adapters keep, and what they make of it.

    Raises:
        KvprobeError: it is no http or https address.
    """

    last_word = False

    def __init__(self, url: str, metrics: Sequence[Metrics]) -> None:
        self.name = f"metrics:{url}"
        self._page = _PageAt(_checked(url))
        self._metrics = metrics
        self._reader = _Reader(lambda name: any(m.keep.match(name) for m in metrics))
        self._rows = _Rows()
        self._came, self._why = False, ""
        self._said: list[EngineFacts | None] = [None] * len(metrics)
        self._batches: deque[FeedBatch] = deque()
        self._waiting = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvprobe-metrics", daemon=True)
        self._thread.start()

    def poll(self, clock: WallClock) -> FeedBatch:
        """What scrapes brought; never waits for one."""
        self._page.cut_if_late()
        batches = []
        while self._batches:
            batches.append(self._batches.popleft())
        self._waiting = 0
        return FeedBatch(
            news=[news for batch in batches for news in batch.news],
            counters=[row for batch in batches for row in batch.counters],
            understood=sum(batch.understood for batch in batches),
            ignored=sum(batch.ignored for batch in batches),
            lost=sum(batch.lost for batch in batches),
            notes=[note for batch in batches for note in batch.notes],
        )

    def close(self, clock: WallClock) -> FeedBatch:
        """Scrape a last time, wait at most some seconds for it, and return the rest."""
        self._stop.set()
        until = time.monotonic() + TIMEOUT_S + LAST_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < until:
            self._page.cut_if_late()
            self._thread.join(_LOOK_S)
        return self.poll(clock)

    def _run(self) -> None:
        pause_s, failures = 0.0, 0
        while not self._stop.wait(pause_s):
            began = time.monotonic()
            if self._scrape(TIMEOUT_S):
                failures = 0
                pause_s = max(INTERVAL_S - (time.monotonic() - began), 0)
            else:
                pause_s = min(INTERVAL_S * 2**failures, LONGEST_PAUSE_S)
                failures = min(failures + 1, 16)
        self._scrape(LAST_TIMEOUT_S)
        never = () if self._came else (f"no page came from {self.name}: {self._why}",)
        self._put(FeedBatch(counters=self._rows.last(), notes=never))

    def _scrape(self, timeout_s: float) -> bool:
        """Fetch the page and take what is new on it; False if it cannot be had."""
        try:
            page = self._page.fetch(timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._why = _in_words(error)
            self._put(FeedBatch(ignored=1))
            return False
        self._came = True
        samples, ignored = self._reader.samples(page)
        self._put(
            FeedBatch(
                news=[facts for facts in self._facts(samples) if facts is not None],
                counters=self._rows.changed(page.time_ns, samples),
                understood=1,
                ignored=ignored,
            )
        )
        return True

    def _facts(self, samples: Sequence[Sample]) -> Iterator[EngineFacts | None]:
        """What each adapter makes of its samples, if that changed."""
        for place, metrics in enumerate(self._metrics):
            if metrics.facts is None:
                continue
            try:
                facts = metrics.facts([s for s in samples if metrics.keep.match(s.name)])
            except _STRANGE:
                continue
            if facts != self._said[place]:
                self._said[place] = facts
                yield facts

    def _put(self, batch: FeedBatch) -> None:
        if self._waiting + len(batch.counters) > MOST_ROWS_WAITING:
            batch = replace(batch, counters=(), lost=len(batch.counters))
        self._waiting += len(batch.counters)
        self._batches.append(batch)


# ---------------------------------------------------------------- fetching


class _Page(NamedTuple):
    time_ns: int
    body: bytes


class _PageAt:
    """Fetches one page. ``cut_if_late`` is for other threads."""

    def __init__(self, url: SplitResult) -> None:
        self._url = url
        self._target = (url.path or "/metrics") + (f"?{url.query}" if url.query else "")
        self._socket: socket.socket | None = None
        self._deadline = math.inf

    def fetch(self, timeout_s: float) -> _Page:
        """The page.

        Raises:
            OSError: the server cannot be reached, or is too slow.
            http.client.HTTPException: it does not speak HTTP.
            ValueError: the answer is no page, is cut or too long.
        """
        of_kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        host, port = self._url.hostname or "", self._url.port
        connection = of_kind[self._url.scheme](host, port, timeout=timeout_s)
        self._deadline = time.monotonic() + timeout_s
        try:
            connection.connect()
            self._socket = connection.sock
            headers = {"Accept": _ACCEPT, "User-Agent": "kvprobe", "Connection": "close"}
            connection.request("GET", self._target, headers=headers)
            with connection.getresponse() as response:
                time_ns = time.monotonic_ns()
                if response.status != http.client.OK:
                    raise ValueError(f"status {response.status}")
                body = self._body(response)
                if time.monotonic() > self._deadline:  # what was cut looks like an end
                    raise TimeoutError
                return _Page(time_ns, body)
        finally:
            self._socket, self._deadline = None, math.inf
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while data := response.read1(_PIECE):
            body += data
            if len(body) > MOST_BYTES:
                raise ValueError("the page is too long")
            if time.monotonic() > self._deadline:
                raise TimeoutError
        if response.length or not body:
            raise ValueError("the page is cut")
        return bytes(body)

    def cut_if_late(self) -> None:
        """End a fetch that is late: a server that sends byte by byte meets no timeout."""
        open_socket = self._socket
        if open_socket is not None and time.monotonic() > self._deadline:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)


def _in_words(error: Exception) -> str:
    """Why there is no page, without what a stranger's server may have written."""
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return "it does not speak HTTP"
    if isinstance(error, TimeoutError):
        return "too slow"
    return (getattr(error, "strerror", None) or str(error))[:100]


def _checked(url: str) -> SplitResult:
    error = KvprobeError(
        f"metrics:{url} is no address of a page", "such as metrics:http://127.0.0.1:8000/metrics"
    )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise error
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise error
    except ValueError:
        raise error from None
    if parts.username is not None:
        raise KvprobeError(
            f"the address of the page on {parts.hostname} holds a password",
            "pages that need one are not read",
        )
    return parts


# ---------------------------------------------------------------- reading


class _Reader:
    """The wanted samples of a page, in Prometheus' text format or as OpenMetrics.

    Line by line they are alike: an exemplar stands where a time does, and both are skipped.

    The parser is careful and slow, and a page has the same series each second: what it made of a
    series is kept, and then only its value is read.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._known: dict[str, Sample] = {}

    def samples(self, page: _Page) -> tuple[list[Sample], int]:
        """Samples, and how many lines are not understood."""
        *lines, rest = page.body.decode(errors="replace").split("\n")
        ignored = int(bool(rest))  # a line without its end may be a part of one
        samples: list[Sample] = []
        known: dict[str, Sample] = {}
        for line in lines:
            if not self._is_wanted(line):
                continue
            series, _, value = line.rpartition(" ")
            try:
                if len(samples) >= MOST_SAMPLES or len(line) > MOST_LINE_CHARS:
                    raise ValueError
                if series in self._known:
                    sample = self._known[series]._replace(value=float(value))
                    known[series] = sample
                else:
                    sample, plain = _parsed(line)
                    if plain:
                        known[series] = sample
            except _STRANGE:
                ignored += 1
                continue
            if not math.isnan(sample.value):
                samples.append(sample)
        self._known = known
        return samples, ignored

    def _is_wanted(self, line: str) -> bool:
        name = _NAME.match(line)
        return name is not None and not name[0].endswith(_NOT_COUNTED) and self._wanted(name[0])


def _parsed(line: str) -> tuple[Sample, bool]:
    """The sample of a line, and whether its value is all that follows its labels."""
    [family] = text_string_to_metric_families(line)
    [sample] = family.samples
    return Sample(sample.name, sample.labels, float(sample.value)), sample.timestamp is None


class _Rows:
    """Rows of ``host`` for samples."""

    def __init__(self) -> None:
        self._time_ns = 0
        self._values: dict[tuple[str, str], float] = {}
        self._unwritten: dict[tuple[str, str], float] = {}

    def changed(self, time_ns: int, samples: Iterable[Sample]) -> list[dict[str, Any]]:
        """Rows of what is new or has another value than on the page before."""
        values = {(s.name, _subject(s.labels)): s.value for s in samples}
        before, self._values, self._time_ns = self._values, values, time_ns
        new = {key: value for key, value in values.items() if before.get(key) != value}
        self._unwritten = {key: value for key, value in values.items() if key not in new}
        return self._made(new)

    def last(self) -> list[dict[str, Any]]:
        """Rows of what the last page had and no row was made of."""
        return self._made(self._unwritten)

    def _made(self, values: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
        return [
            {"time_ns": self._time_ns, "metric": metric, "subject": subject, "value": value}
            for (metric, subject), value in values.items()
        ]


def _subject(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={labels[name]}" for name in sorted(labels))
