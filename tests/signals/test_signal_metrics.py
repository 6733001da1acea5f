"""Pages of real expositions, of recorded engines and of strangers become exact rows."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    start_http_server,
)
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvprobe.adapter import Metrics, Sample
from kvprobe.clock import WallClock
from kvprobe.engines import engines
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.schema import HOST
from kvprobe.signals import FeedBatch, metrics
from kvprobe.signals.metrics import MetricsFeed

RECORDED = Path(__file__).parents[1] / "data/engines/vllm"
WHOLE = Metrics(re.compile(""))
CLOCK = WallClock()
Row = tuple[str, str, float]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.02)
    monkeypatch.setattr(metrics, "TIMEOUT_S", 10)
    monkeypatch.setattr(metrics, "LAST_TIMEOUT_S", 10)
    monkeypatch.setattr(metrics, "LONGEST_PAUSE_S", 0.08)


class Server:
    """A page of ours: ``answer`` sends it."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.requests: list[tuple[str, str]] = []
        self.pauses = [time.monotonic()]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.requests.append((handler.path, handler.headers["Accept"]))
                self.pauses.append(time.monotonic())
                answer(handler)

            def log_message(handler, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def page(body: bytes, status: int = 200, **headers: str) -> Callable[..., None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[..., None]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[..., None]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def until(
    feed: MetricsFeed, enough: Callable[[Sequence[FeedBatch]], bool], seconds: float = 5
) -> list[FeedBatch]:
    batches: list[FeedBatch] = []
    end = time.monotonic() + seconds
    while not enough(batches):
        assert time.monotonic() < end, "never came"
        batches.append(feed.poll(CLOCK))
        time.sleep(0.005)
    return batches


def pages(count: int) -> Callable[[Sequence[FeedBatch]], bool]:
    return lambda batches: sum(b.understood for b in batches) >= count


def attempts(count: int) -> Callable[[Sequence[FeedBatch]], bool]:
    return lambda batches: sum(b.understood + b.ignored for b in batches) >= count


def rows(batches: Sequence[FeedBatch]) -> list[Row]:
    found = [row for batch in batches for row in batch.counters]
    assert all(set(row) == {c.name for c in HOST.columns} for row in found)
    return [(row["metric"], row["subject"], row["value"]) for row in found]


def total(batches: Sequence[FeedBatch], name: str) -> int:
    return sum(getattr(batch, name) for batch in batches)


# ---------------------------------------------------------------- a real exposition


def test_a_real_exposition() -> None:
    registry = CollectorRegistry()
    loads = Counter("load_bytes", "b", ["tier", "engine"], registry=registry)
    waiting = Gauge("waiting", "w", registry=registry)
    Gauge("other_waiting", "o", registry=registry).set(1)
    seconds = Histogram("wait_seconds", "s", registry=registry)
    strange = Gauge("strange", "s", registry=registry)
    loads.labels("1:fs", "0").inc(1009)
    loads.labels('a"b\\c\nd', "0").inc(3)
    waiting.set(2)
    seconds.observe(0.25)
    strange.set(math.nan)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    keep = Metrics(re.compile("load_|wait|strange"))
    before_ns = time.monotonic_ns()
    feed = MetricsFeed(f"http://127.0.0.1:{server.server_port}", [keep])
    try:
        first = until(feed, pages(2))
        assert rows(first) == [
            ("load_bytes_total", "engine=0,tier=1:fs", 1009.0),
            ("load_bytes_total", 'engine=0,tier=a"b\\c\nd', 3.0),
            ("waiting", "", 2.0),
            ("wait_seconds_count", "", 1.0),
            ("wait_seconds_sum", "", 0.25),
        ]
        times = {row["time_ns"] for batch in first for row in batch.counters}
        assert len(times) == 1 and before_ns < times.pop() < time.monotonic_ns()
        loads.labels("1:fs", "0").inc(4)
        strange.set(7)
        second = until(feed, pages(3))
        assert rows(second) == [
            ("load_bytes_total", "engine=0,tier=1:fs", 1013.0),
            ("strange", "", 7.0),
        ]
        waiting.set(5)
        time.sleep(0.1)
        third = until(feed, pages(1))
        assert rows(third) == [("waiting", "", 5.0)]
        loads.labels("1:fs", "0").inc(6)
    finally:
        before_ns = time.monotonic_ns()
        last = feed.close(CLOCK)
        server.shutdown()
        server.server_close()
        thread.join()
    # A page between the last change and the end may have told it already.
    assert sorted(set(rows([last]))) == sorted(
        [
            ("load_bytes_total", "engine=0,tier=1:fs", 1019.0),
            ("load_bytes_total", 'engine=0,tier=a"b\\c\nd', 3.0),
            ("waiting", "", 5.0),
            ("wait_seconds_count", "", 1.0),
            ("wait_seconds_sum", "", 0.25),
            ("strange", "", 7.0),
        ]
    )
    ends = {row["metric"]: row["time_ns"] for row in last.counters}
    assert len(set(ends.values())) == 1
    assert max(row["time_ns"] for row in last.counters) > before_ns
    assert total([*first, *second, *third, last], "ignored") == 0


def test_openmetrics_with_exemplars(serve: Callable[..., Server]) -> None:
    registry = CollectorRegistry()
    Counter("hits", "h", registry=registry).inc(13, exemplar={"trace_id": "a # b"})
    Gauge("text", "t", ["of"], registry=registry).labels("x # y").set(3)
    Info("build", "b", registry=registry).info({"version": "1"})
    body = generate_latest(registry)  # type: ignore[no-untyped-call]
    assert b" # {" in body
    server = serve(page(body, Content_Type=CONTENT_TYPE_LATEST))
    feed = MetricsFeed(server.url, [WHOLE])
    batches = until(feed, pages(1))
    batches.append(feed.close(CLOCK))
    assert rows(batches)[:3] == [
        ("hits_total", "", 13.0),
        ("text", "of=x # y", 3.0),
        ("build_info", "version=1", 1.0),
    ]
    assert total(batches, "ignored") == 0


def test_what_is_asked_for(serve: Callable[..., Server]) -> None:
    server = serve(page(b"a 1\n"))
    base = server.url.removesuffix("/metrics")
    for url, path in (
        (base, "/metrics"),
        (f"{base}/", "/"),
        (f"{base}/server/metrics?name=a&b=%20", "/server/metrics?name=a&b=%20"),
    ):
        feed = MetricsFeed(url, [WHOLE])
        until(feed, pages(1))
        feed.close(CLOCK)
        assert server.requests[-1] == (path, "text/plain; version=0.0.4")


# ---------------------------------------------------------------- recorded engines


@pytest.mark.parametrize("name", ["metrics-fs-tier", "metrics-info-run", "metrics-after-restart"])
def test_recorded_pages_of_vllm(serve: Callable[..., Server], name: str) -> None:
    adapter = next(e.metrics for e in engines().values() if e.name == "vllm")
    assert adapter is not None
    body = (RECORDED / f"{name}.txt").read_bytes()
    server = serve(page(body, Content_Type="text/plain; version=0.0.4; charset=utf-8"))
    feed = MetricsFeed(server.url, [adapter, WHOLE])
    batches = until(feed, pages(2))
    batches.append(feed.close(CLOCK))
    simple = re.compile(r"^([a-z0-9_:]+)(?:\{(.*)\})? (\S+)$", re.M)
    expected = [
        (metric, ",".join(p for p in labels.replace('"', "").split(",") if p), float(value))
        for metric, labels, value in simple.findall(body.decode())
        if not metric.endswith(("_bucket", "_created"))
    ]
    assert len(expected) > 17
    made = rows(batches)
    assert sorted(made[: len(expected)]) == sorted(expected)
    assert sorted(made[len(expected) :]) == sorted(expected)  # all again at the end
    assert total(batches, "ignored") == 0


def test_facts_are_told_when_they_change(serve: Callable[..., Server]) -> None:
    value = 3
    seen: list[list[str]] = []

    def facts(samples: Sequence[Sample]) -> EngineFacts | None:
        seen.append([sample.name for sample in samples])
        return EngineFacts("e", unit_tokens=int(samples[0].value))

    def raises(samples: Sequence[Sample]) -> EngineFacts | None:
        raise KeyError

    def answer(handler: BaseHTTPRequestHandler) -> None:
        page(f"b 1\na_tokens {value}\na_bucket 7\n".encode())(handler)

    feed = MetricsFeed(
        serve(answer).url,
        [Metrics(re.compile("b"), raises), Metrics(re.compile("a_"), facts), WHOLE],
    )
    first = until(feed, pages(3))
    value = 5
    second = until(feed, lambda bs: any(b.news for b in bs))
    last = feed.close(CLOCK)
    assert [n for b in first for n in b.news] == [EngineFacts("e", unit_tokens=3)]
    assert [n for b in second for n in b.news] == [EngineFacts("e", unit_tokens=5)]
    assert not last.news
    assert all(names == ["a_tokens"] for names in seen)


# ---------------------------------------------------------------- failures


def test_an_engine_that_comes_later_goes_and_comes_again() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    registry = CollectorRegistry()
    Counter("hits", "h", registry=registry).inc(13)
    feed = MetricsFeed(f"http://127.0.0.1:{port}/metrics", [WHOLE])
    until(feed, lambda batches: total(batches, "ignored") >= 3)
    for _ in range(2):
        server, thread = start_http_server(port, "127.0.0.1", registry)
        until(feed, pages(3))
        server.shutdown()
        server.server_close()
        thread.join()
        feed.poll(CLOCK)
        until(feed, lambda batches: total(batches, "ignored") >= 3)
    last = feed.close(CLOCK)  # it is gone: the values of the last page that came
    assert rows([last]) == [("hits_total", "", 13.0)]


def test_pauses_grow_while_it_fails(serve: Callable[..., Server]) -> None:
    server = serve(page(b"", status=503))
    feed = MetricsFeed(server.url, [WHOLE])
    until(feed, attempts(6))
    feed.close(CLOCK)
    pauses = [
        later - sooner
        for sooner, later in zip(server.pauses[1:], server.pauses[2:-1], strict=False)
    ]
    for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.08), strict=False):
        assert least <= pause < least + 0.3


REFUSED: list[Callable[..., None]] = [
    page(b"a 1\n", status=404),
    page(b"a 1\n", status=500),
    page(b"a 1\n", status=302, Location="http://127.0.0.1:1/metrics"),
    page(b"a 1\n", Content_Length="1009"),  # ends too early
    page(b"zz\r\na 1\n", Transfer_Encoding="chunked"),
    lambda handler: handler.wfile.write(b"\x00\xff" * 99),
    lambda handler: None,
]


@pytest.mark.parametrize("answer", REFUSED)
def test_answers_that_are_no_page(serve: Callable[..., Server], answer: Any) -> None:
    feed = MetricsFeed(serve(answer).url, [WHOLE])
    batches = until(feed, attempts(2))
    last = feed.close(CLOCK)
    assert total([*batches, last], "understood") == 0
    assert rows([*batches, last]) == []
    assert [note.partition(": ")[0] for note in last.notes] == [f"no page came from {feed.name}"]


def test_redirects_are_not_followed(serve: Callable[..., Server]) -> None:
    other = serve(page(b"a 1\n"))
    feed = MetricsFeed(serve(page(b"", status=302, Location=other.url)).url, [WHOLE])
    until(feed, attempts(2))
    feed.close(CLOCK)
    assert other.requests == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (page(b"", status=404), "status 404"),
        (lambda handler: handler.wfile.write(b"secret\r\n"), "it does not speak HTTP"),
        (page(b"a", Content_Length="7"), "the page is cut"),
    ],
)
def test_why_no_page_came(serve: Callable[..., Server], answer: Any, why: str) -> None:
    feed = MetricsFeed(serve(answer).url, [WHOLE])
    until(feed, attempts(1))
    assert list(feed.close(CLOCK).notes) == [f"no page came from {feed.name}: {why}"]


def hangs(sent: bytes) -> Callable[..., None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(sent)
        handler.wfile.flush()
        time.sleep(3)

    return answer


def drips(head: bytes, piece: bytes) -> Callable[..., None]:
    """Sends a byte so often that no single read meets its time limit."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            handler.wfile.write(piece)
            time.sleep(0.05)

    return answer


SLOW = [
    hangs(b""),
    hangs(b"HTTP/1.1 200 OK\r\n"),
    hangs(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na 1\n"),
    drips(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    drips(b"HTTP/1.1 200 OK\r\n\r\n", b"a 1\n"),
]


@pytest.mark.parametrize("answer", SLOW)
def test_a_page_that_hangs_holds_up_neither_poll_nor_close(
    serve: Callable[..., Server], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(metrics, "LAST_TIMEOUT_S", 0.3)
    server = serve(answer)
    feed = MetricsFeed(server.url, [WHOLE])
    slowest = 0.0
    batches = []
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        began = time.perf_counter()
        batches.append(feed.poll(CLOCK))
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(0.005)
    assert slowest < 0.1
    assert len(server.requests) >= 2  # the first was given up
    assert total(batches, "understood") == 0 and total(batches, "ignored") >= 1
    began = time.monotonic()
    feed.close(CLOCK)
    assert time.monotonic() - began < 1.5
    assert not feed._thread.is_alive()


def test_a_page_without_end(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_BYTES", 100_003)
    bodies = [b"a 1\n" + b"# b\n" * 24_999, b"a 1\n" + b"# b\n" * 25_000]
    feed = MetricsFeed(serve(lambda handler: page(bodies[0])(handler)).url, [WHOLE])
    until(feed, pages(1))
    bodies.reverse()
    until(feed, lambda batches: total(batches, "ignored") > 0)
    feed.close(CLOCK)


# ---------------------------------------------------------------- lines


def read(body: bytes, keep: str = "") -> tuple[list[Sample], int]:
    wanted = re.compile(keep)
    reader = metrics._Reader(lambda name: wanted.match(name) is not None)
    first = reader.samples(metrics._Page(1, body))
    assert reader.samples(metrics._Page(2, body)) == first  # as remembered
    return first


def test_a_line_that_does_not_parse_is_counted_and_the_rest_kept() -> None:
    good = [b'a{n="%d"} %d' % (n, n * n) for n in range(101)]
    bad = [b"a{", b"a", b'a{n="1} 3', b"a x", b'a{n="1",n="2"} 3', b"a 1_0", b"a{n=1} 3"]
    lines = [*good[:50], *bad, b"# a 3", b"", b"\xff\xfe", *good[50:]]
    samples, ignored = read(b"\n".join(lines) + b"\n")
    assert [sample.value for sample in samples] == [float(n * n) for n in range(101)]
    assert ignored == len(bad)


def test_a_last_line_without_an_end_may_be_a_part() -> None:
    assert read(b"a 1\nb 17") == ([Sample("a", {}, 1.0)], 1)


def test_time_stamps_of_samples_are_not_values() -> None:
    reader = metrics._Reader(lambda name: True)
    for value in (3, 3, 5, 5):
        body = b'a{b="c"} %d 1796145464460\nd %d\n' % (value, value)
        samples, ignored = reader.samples(metrics._Page(1, body))
        assert samples == [Sample("a", {"b": "c"}, value), Sample("d", {}, value)]
        assert ignored == 0


def test_labels_are_in_the_order_of_their_names() -> None:
    samples, _ = read(b'a{z="1",b="3",a="2"} 5\n')
    [row] = metrics._Rows().changed(7, samples)
    assert row == {"time_ns": 7, "metric": "a", "subject": "a=2,b=3,z=1", "value": 5.0}


def test_long_lines_and_too_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_SAMPLES", 53)
    long = b'a{b="%s"} 1\n' % (b"x" * metrics.MOST_LINE_CHARS)
    samples, ignored = read(long + b"".join(b"a%d 1\n" % n for n in range(59)))
    assert (len(samples), ignored) == (53, 7)


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b'a{b="', b'"} 1', b"\\", b" # {"])))
def test_nothing_on_a_page_raises(parts: list[bytes]) -> None:
    body = b"\n".join([b"a 1", b"a" + b"".join(parts), *parts, b""])
    reader = metrics._Reader(lambda name: True)
    for _ in range(2):
        samples, _ = reader.samples(metrics._Page(1, body))
        assert Sample("a", {}, 1.0) in samples


def test_rows_that_nobody_polls_for_are_lost_and_counted(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_ROWS_WAITING", 7)
    count = 0

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonlocal count
        count += 1
        page(b"a %d\nb %d\nc 1\n" % (count, count))(handler)

    server = serve(answer)
    feed = MetricsFeed(server.url, [WHOLE])
    end = time.monotonic() + 5
    while len(server.requests) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    batch = feed.poll(CLOCK)
    assert [row["value"] for row in batch.counters] == [1, 1, 1, 2, 2, 3, 3]
    assert batch.lost >= 4 and batch.lost % 2 == 0
    feed.close(CLOCK)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "localhost:8000/metrics",
        "ftp://127.0.0.1/metrics",
        "file:///etc/passwd",
        "http://",
        "http:///metrics",
        "http://host:port/",
        "http://host:0/",
        "http://host:70000/",
        "http://[::1/",
        "http://ho st/",
        "http://host/a\nb",
        "http://höst/",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(KvprobeError, match="is no address of a page") as error:
        MetricsFeed(url, [])
    assert "\n" not in error.value.message.removeprefix(f"metrics:{url}")


def test_a_password_is_not_shown() -> None:
    with pytest.raises(KvprobeError) as error:
        MetricsFeed("http://user:secret@host/metrics", [])
    assert "secret" not in error.value.message + error.value.hint
