"""Spans from the official exporters, from recorded engines and from strangers, exactly counted."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import (
    OTLPLogExporter as GrpcLogExporter,
)
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
    OTLPMetricExporter as GrpcMetricExporter,
)
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcSpanExporter,
)
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import (
    OTLPLogExporter as HttpLogExporter,
)
from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
    OTLPMetricExporter as HttpMetricExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
    OTLPSpanExporter as HttpSpanExporter,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from kvprobe.adapter import RequestNews, Span
from kvprobe.clock import ClockSample, Moment, WallClock
from kvprobe.engines import engines
from kvprobe.errors import KvprobeError
from kvprobe.signals import FeedBatch, otlp, otlp_server
from kvprobe.signals.otlp import OtlpFeed

RECORDED = Path(__file__).parents[1] / "data/engines/vllm"
PROTOBUF = "application/x-protobuf"
START_NS = 1_796_145_464_460_528_863
OFFSET_NS = 1_700_000_000_000_000_003


def fixed_clock() -> WallClock:
    return WallClock(lambda: ClockSample(7, OFFSET_NS, 11))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def read_id(span: Span, moment: Callable[[int], Moment]) -> RequestNews | None:
    """A reader that knows spans with an ``id``."""
    if "id" not in span.attributes:
        return None
    times = {"arrival_ns": moment(span.start_wall_ns), "finish": moment(span.end_wall_ns)}
    return RequestNews(span.attributes["id"], times=times)


class Heard:
    """A feed on a port of its own and all that it gave."""

    def __init__(self, *read_spans: otlp.ReadSpan) -> None:
        self.port = free_port()
        self.feed = OtlpFeed(str(self.port), read_spans or (read_id,))
        self.clock = fixed_clock()
        self.batches: list[FeedBatch] = []
        self.open = True

    def poll(self) -> Heard:
        self.batches.append(self.feed.poll(self.clock))
        return self

    def close(self) -> Heard:
        if self.open:
            self.open = False
            self.batches.append(self.feed.close(self.clock))
        return self

    @property
    def counts(self) -> tuple[int, int, int]:
        return (
            sum(b.understood for b in self.batches),
            sum(b.ignored for b in self.batches),
            sum(b.lost for b in self.batches),
        )

    @property
    def news(self) -> list[RequestNews]:
        found = [news for b in self.batches for news in b.news]
        assert all(isinstance(news, RequestNews) for news in found)
        return [news for news in found if isinstance(news, RequestNews)]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)

    def post(self, body: Any, path: str = "/v1/traces", **headers: str) -> tuple[int, bytes]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(self.connect()) as connection:
            connection.request("POST", path, body, {"Content-Type": PROTOBUF} | names)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    try:
        yield found
    finally:
        found.close()


def request(spans: int, first: int = 0, **more: Any) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(first, first + spans):
        span = scope.spans.add(
            name="s", start_time_unix_nano=START_NS + number, end_time_unix_nano=START_NS, **more
        )
        span.attributes.add(key="id").value.string_value = f"r{number}"
    return message


def exporter(kind: str, port: int) -> SpanExporter:
    base = f"http://127.0.0.1:{port}"
    match kind:
        case "grpc":
            return GrpcSpanExporter(endpoint=base, insecure=True)
        case "grpc gzip":
            return GrpcSpanExporter(endpoint=base, insecure=True, compression=grpc.Compression.Gzip)
        case "http":
            return HttpSpanExporter(endpoint=f"{base}/v1/traces")
        case "http gzip":
            return HttpSpanExporter(endpoint=f"{base}/v1/traces", compression=Compression.Gzip)
        case _:
            return HttpSpanExporter(endpoint=f"{base}/v1/traces", compression=Compression.Deflate)


def make_spans(to: SpanExporter, service: str, known: int, unknown: int) -> list[ReadableSpan]:
    """Spans by the official SDK, exported in batches when this returns."""
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(to, max_export_batch_size=53))
    tracer = provider.get_tracer("test")
    made: list[ReadableSpan] = []
    for number in range(known + unknown):
        attributes = {"id": f"{service}-{number}"} if number < known else {"other": number}
        with tracer.start_as_current_span("step", attributes=attributes) as span:
            assert isinstance(span, ReadableSpan)
            made.append(span)
    assert provider.force_flush()
    provider.shutdown()
    return made


# ---------------------------------------------------------------- official exporters


@pytest.mark.parametrize("kind", ["grpc", "grpc gzip", "http", "http gzip", "http deflate"])
def test_spans_of_the_official_exporters(heard: Heard, kind: str) -> None:
    made = make_spans(exporter(kind, heard.port), kind, known=101, unknown=13)
    heard.close()
    assert heard.counts == (101, 13, 0)
    for news, span in zip(heard.news, made, strict=False):
        assert span.start_time is not None and span.end_time is not None
        assert news.id == (span.attributes or {})["id"]
        assert news.times["arrival_ns"].middle_ns == span.start_time - OFFSET_NS
        assert news.times["finish"].middle_ns == span.end_time - OFFSET_NS
        assert news.times["finish"].uncertainty_ns == 11


def test_all_at_once_on_one_port(heard: Heard) -> None:
    kinds = {"grpc": 307, "grpc gzip": 211, "http": 401, "http gzip": 103}
    threads = [
        threading.Thread(target=make_spans, args=(exporter(kind, heard.port), kind, count, 0))
        for kind, count in kinds.items()
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        heard.poll()
    for thread in threads:
        thread.join()
    heard.close()
    assert heard.counts == (sum(kinds.values()), 0, 0)
    for kind, count in kinds.items():
        ids = [n.id for n in heard.news if n.id.rpartition("-")[0] == kind]
        assert ids == [f"{kind}-{number}" for number in range(count)]


def test_values_and_service_as_they_were_sent() -> None:
    seen: list[Span] = []
    heard = Heard(lambda span, moment: seen.append(span))
    try:
        provider = TracerProvider(resource=Resource.create({"service.name": "engine"}))
        provider.add_span_processor(BatchSpanProcessor(exporter("grpc", heard.port)))
        values: dict[str, Any] = {
            "text": "é",
            "whole": 2**62 + 1,
            "part": 0.1,
            "yes": True,
            "many": [1, 2],
        }
        with provider.get_tracer("t").start_as_current_span("name", attributes=values):
            pass
        provider.shutdown()
    finally:
        heard.close()
    assert heard.counts == (0, 1, 0)
    [span] = seen
    assert (span.name, span.service) == ("name", "engine")
    assert span.attributes == {name: value for name, value in values.items() if name != "many"}
    assert [type(value) for value in span.attributes.values()] == [str, int, float, bool]


def test_metrics_and_logs_are_accepted_and_not_used(heard: Heard) -> None:
    base = f"http://127.0.0.1:{heard.port}"
    for metric_exporter in (
        GrpcMetricExporter(endpoint=base, insecure=True),
        HttpMetricExporter(endpoint=f"{base}/v1/metrics"),
    ):
        assert metric_exporter.export(MetricsData([])) is MetricExportResult.SUCCESS
        metric_exporter.shutdown()
    for log_exporter in (
        GrpcLogExporter(endpoint=base, insecure=True),
        HttpLogExporter(endpoint=f"{base}/v1/logs"),
    ):
        assert log_exporter.export([]) is LogRecordExportResult.SUCCESS
        log_exporter.shutdown()
    heard.close()
    assert heard.counts == (0, 4, 0)


# ---------------------------------------------------------------- recorded engines


def recorded() -> list[dict[str, Any]]:
    files = [RECORDED / "spans-fs-tier.jsonl", RECORDED / "spans-info-run.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def names(messages: list[dict[str, Any]]) -> list[str]:
    return [
        span["name"]
        for message in messages
        for resource in message["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def send_json(heard: Heard, message: dict[str, Any]) -> None:
    answer = heard.post(json.dumps(message), Content_Type="application/json; charset=utf-8")
    assert answer == (200, b"{}")


def send_protobuf(heard: Heard, message: dict[str, Any]) -> None:
    body = json_format.ParseDict(message, ExportTraceServiceRequest()).SerializeToString()
    assert heard.post(gzip.compress(body), Content_Encoding="gzip") == (200, b"")


def send_grpc(heard: Heard, message: dict[str, Any]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{heard.port}") as channel:
        body = json_format.ParseDict(message, ExportTraceServiceRequest())
        stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Export(body, timeout=10)
    assert answer == ExportTraceServiceResponse()


@pytest.mark.parametrize("send", [send_json, send_protobuf, send_grpc])
def test_recorded_spans_of_vllm(send: Callable[[Heard, dict[str, Any]], None]) -> None:
    read_span = next(e.read_span for e in engines().values() if e.name == "vllm")
    assert read_span is not None
    heard = Heard(read_span)
    messages = recorded()
    try:
        for message in messages:
            send(heard, message)
    finally:
        heard.close()
    spans = names(messages)
    requests = spans.count("llm_request")
    assert requests > 17
    assert heard.counts == (requests, len(spans) - requests, 0)
    assert all(news.id.startswith("cmpl-") for news in heard.news)


def test_ids_as_hex_digits_which_is_how_otlp_writes_json(heard: Heard) -> None:
    message = json_format.MessageToDict(request(3))
    for span in message["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span |= {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174"}
        span |= {"kind": 2, "fieldOfTheFuture": [1]}
    send_json(heard, message)
    assert heard.close().counts == (3, 0, 0)


# ---------------------------------------------------------------- strangers


def test_what_is_malformed_is_refused_and_counted(heard: Heard) -> None:
    good = request(5).SerializeToString()
    noise = random.Random(17)
    bodies = [noise.randbytes(noise.randrange(1, 500)) for _ in range(97)]
    for body in bodies:
        with pytest.raises(otlp_server.Malformed):  # as random bytes are, but for a rare few
            otlp._decoded(otlp_server.Received("traces", body))
        assert heard.post(body)[0] == 400
    refused = [
        heard.post(good[:-1])[0],
        heard.post(b"{", Content_Type="application/json")[0],
        heard.post(b"\xff\xfe", Content_Type="application/json")[0],
        heard.post(b'{"resourceSpans": 3}', Content_Type="application/json")[0],
        heard.post(b"[" * 100_000, Content_Type="application/json")[0],
        heard.post(good, Content_Encoding="gzip")[0],
        heard.post(gzip.compress(good)[:-9], Content_Encoding="gzip")[0],
        heard.post(good, Content_Encoding="deflate")[0],
        heard.post(zlib.compress(good)[:-9], Content_Encoding="deflate")[0],
        heard.post(good, Content_Encoding="zstd")[0],
        heard.post(good, Content_Type="text/plain")[0],
        heard.post(good, "/v1/profiles")[0],
        heard.post(good, "/")[0],
    ]
    assert refused == [400] * 9 + [415, 415, 404, 404]
    assert heard.post(good)[0] == 200
    assert heard.close().counts == (5, len(bodies) + len(refused), 0)


def test_malformed_over_grpc(heard: Heard) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{heard.port}") as channel:
        service = "/opentelemetry.proto.collector.trace.v1.TraceService"
        export = channel.unary_unary(f"{service}/Export")
        with pytest.raises(grpc.RpcError) as error:
            export(b"\xff" * 101, timeout=10)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"{service}/Import")(b"", timeout=10)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        export(request(7).SerializeToString(), timeout=10)
    assert heard.close().counts == (7, 1, 0)


def test_bytes_that_are_no_protocol(heard: Heard) -> None:
    noise = random.Random(3)
    lines = [b"PRI * HTTP/2.0\r\n" + noise.randbytes(199), b"GET / HTTP/9.9\r\n\r\n", b"\n" * 99]
    for data in [*(noise.randbytes(307) + b"\r\n\r\n" for _ in range(53)), *lines]:
        with socket.create_connection(("127.0.0.1", heard.port), timeout=10) as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not stranger.recv(1 << 16):
                        break
                except ConnectionResetError:
                    break
    send_grpc(heard, json_format.MessageToDict(request(11)))
    assert heard.post(request(11).SerializeToString())[0] == 200
    assert heard.close().counts[0] == 22


def test_too_large_as_sent_or_unpacked(heard: Heard) -> None:
    zeros = bytes(otlp_server.MOST_BYTES + 1)
    assert heard.post(zeros)[0] == 413
    assert heard.post(gzip.compress(zeros), Content_Encoding="gzip")[0] == 413
    assert heard.post(zlib.compress(zeros), Content_Encoding="deflate")[0] == 413
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        with grpc.insecure_channel(f"127.0.0.1:{heard.port}") as channel:
            export = channel.unary_unary(
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            )
            with pytest.raises(grpc.RpcError) as error:
                export(zeros, timeout=10, compression=compression)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert heard.post(request(3).SerializeToString())[0] == 200
    assert heard.close().counts == (3, 3, 0)


def test_a_body_in_chunks(heard: Heard) -> None:
    body = request(19).SerializeToString()
    pieces = iter([body[:101], body[101:]])
    assert heard.post(pieces)[0] == 200
    for size in (b"-5", b"zz", b"", b"0x3", b"9" * 20):
        with socket.create_connection(("127.0.0.1", heard.port), timeout=10) as stranger:
            head = b"POST /v1/traces HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            stranger.sendall(head + size + b"\r\n")
            assert stranger.makefile("rb").readline().startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", heard.port), timeout=10) as stranger:
        stranger.sendall(b"POST /v1/traces HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
        assert stranger.makefile("rb").readline().startswith(b"HTTP/1.1 411")
    assert heard.close().counts == (19, 6, 0)


def test_spans_outside_of_our_time_are_ignored(heard: Heard) -> None:
    message = request(5)
    spans = message.resource_spans[0].scope_spans[0].spans
    spans[1].start_time_unix_nano = 2**64 - 1
    spans[3].end_time_unix_nano = 2**62
    assert heard.post(message.SerializeToString())[0] == 200
    assert heard.close().counts == (3, 2, 0)


@pytest.mark.parametrize(
    "error", [KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError]
)
def test_a_reader_that_raises_leaves_the_span_to_the_next(error: type[Exception]) -> None:
    def raises(span: Span, moment: Callable[[int], Moment]) -> None:
        raise error

    heard = Heard(raises, read_id)
    message = request(7)
    del message.resource_spans[0].scope_spans[0].spans[2].attributes[:]
    assert heard.post(message.SerializeToString())[0] == 200
    assert heard.close().counts == (6, 1, 0)


# ---------------------------------------------------------------- bounds


def test_what_does_not_fit_is_lost_and_told(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MOST_SPANS_WAITING", 1009)
    answers = []
    for number in range(7):
        status, body = heard.post(request(211, 1000 * number).SerializeToString())
        assert status == 200
        answers.append(ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans)
    assert answers == [0] * 4 + [211] * 3
    assert heard.poll().counts == (4 * 211, 0, 3 * 211)
    assert heard.post(request(1009).SerializeToString()) == (200, b"")
    assert heard.close().counts == (4 * 211 + 1009, 0, 3 * 211)


def test_bytes_that_wait_are_bounded(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    body = request(103).SerializeToString()
    monkeypatch.setattr(otlp, "MOST_BYTES_WAITING", 3 * len(body) + 1)
    for _ in range(5):
        heard.post(body)
    assert heard.close().counts == (3 * 103, 0, 2 * 103)


def test_a_poll_does_a_bounded_work(heard: Heard) -> None:
    for number in range(3):
        assert heard.post(request(1499, 1499 * number).SerializeToString())[0] == 200
    for _ in range(4):
        heard.poll()
    assert [batch.understood for batch in heard.batches] == [2000, 2000, 497, 0]
    assert [news.id for news in heard.news] == [f"r{number}" for number in range(3 * 1499)]


HALVES = [
    b"",
    b"PO",
    b"POST /v1/traces HTTP/1.1\r\nContent-Le",
    b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\n"
    b"Content-Length: 1000\r\n\r\n0123",
    b"POST /v1/traces HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n0123",
    b"PRI * HT",
    b"PRI * HTTP/2.0\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x04",
]


def test_clients_that_send_half_and_stop_hold_up_nobody(heard: Heard) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        for half in HALVES * 5:
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", heard.port)))
            slow.sendall(half)
        for kind in ("grpc", "http"):
            make_spans(exporter(kind, heard.port), kind, known=101, unknown=0)
        assert time.monotonic() - began < 2
        began = time.monotonic()
        heard.close()
        assert time.monotonic() - began < 2
    heads_that_ended_early = 5
    assert heard.counts == (202, heads_that_ended_early, 0)


def test_grpc_calls_that_stop_half_way_hold_up_neither_calls_nor_close(heard: Heard) -> None:
    never = threading.Event()

    def half() -> Iterator[bytes]:
        never.wait()
        yield b""

    channels = [
        grpc.insecure_channel(f"127.0.0.1:{heard.port}", [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(3)
    ]
    try:
        path = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
        calls = [channel.stream_unary(path).future(half()) for channel in channels * 7]
        make_spans(exporter("grpc", heard.port), "x", known=11, unknown=0)
        began = time.monotonic()
        heard.close()
        assert time.monotonic() - began < 2
        assert all(isinstance(call.exception(timeout=5), grpc.RpcError) for call in calls)
    finally:
        never.set()
        for channel in channels:
            channel.close()
    assert heard.counts == (11, 0, 0)


def test_who_is_too_slow_is_cut(heard: Heard) -> None:
    with socket.create_connection(("127.0.0.1", heard.port), timeout=5) as slow:
        slow.sendall(HALVES[3])
        time.sleep(0.1)
        server = heard.feed._server._http
        [connection] = server._open
        server.give_time(connection, 0.3)
        for _ in range(2):
            slow.sendall(b"x")
            time.sleep(0.05)
        assert slow.recv(1) == b""
    assert heard.post(request(3).SerializeToString())[0] == 200
    assert heard.close().counts == (3, 0, 0)


def test_connections_are_limited(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_server, "MOST_CONNECTIONS", 7)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", heard.port), timeout=5))
            for _ in range(8)
        ]
        assert opened[-1].recv(1) == b""
    until = time.monotonic() + 5
    while heard.feed._server._http._open and time.monotonic() < until:
        time.sleep(0.01)
    assert heard.post(request(3).SerializeToString())[0] == 200


def test_answers_are_fast_on_a_connection_that_stays(heard: Heard) -> None:
    body = json_format.MessageToJson(request(3))
    took = []
    with closing(heard.connect()) as connection:
        for _ in range(101):
            began = time.perf_counter()
            connection.request("POST", "/v1/traces", body, {"Content-Type": "application/json"})
            assert connection.getresponse().read() == b"{}"
            took.append(time.perf_counter() - began)
    assert sorted(took)[50] < 0.02  # a delayed acknowledgement alone is 0.04
    assert heard.close().counts == (3 * 101, 0, 0)


# ---------------------------------------------------------------- the port


def test_a_port_in_use_says_by_whom(heard: Heard) -> None:
    with pytest.raises(KvprobeError) as error:
        OtlpFeed(str(heard.port), [])
    assert f"port {heard.port} of 127.0.0.1 is taken by" in error.value.message
    assert f"(PID {os.getpid()})" in error.value.message
    assert error.value.hint == "give another port, and point the engine to it"


@pytest.mark.parametrize(
    "address", ["", "0", "65536", "x", "host:", "4317:host", "-1", "43 17", "*:4317"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(KvprobeError, match="no address to listen on"):
        OtlpFeed(address, [])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(KvprobeError, match="cannot listen on port 4319"):
        OtlpFeed(f"{host}:4319", [])


@pytest.mark.parametrize("written", ["{}", "127.0.0.1:{}", "localhost:{}"])
def test_only_loopback_is_listened_on_unless_another_host_is_written(written: str) -> None:
    port = free_port()
    feed = OtlpFeed(written.format(port), [])
    assert feed.name == f"otlp:{written.format(port)}"
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    finally:
        feed.close(fixed_clock())


def test_nobody_sent() -> None:
    heard = Heard()
    assert list(heard.close().batches[-1].notes) == [f"nobody sent to otlp:{heard.port}"]
    heard = Heard()
    assert heard.post(b"", "/v1/logs")[0] == 200
    assert not heard.poll().close().batches[-1].notes


def test_another_host_that_is_written() -> None:
    port = free_port()
    feed = OtlpFeed(f"127.0.0.2:{port}", [])
    try:
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    finally:
        feed.close(fixed_clock())


def test_close_leaves_nothing_behind_and_gives_the_rest() -> None:
    port = free_port()
    for _ in range(3):
        feed = OtlpFeed(str(port), [read_id])
        make_spans(exporter("grpc", port), "g", known=17, unknown=0)
        make_spans(exporter("http", port), "h", known=19, unknown=2)
        last = feed.close(fixed_clock())
        assert (last.understood, last.ignored, last.lost) == (36, 2, 0)
    left = [t.name for t in threading.enumerate() if "kvprobe" in t.name]
    assert not left
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
