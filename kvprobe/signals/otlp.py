"""OpenTelemetry spans that an engine sends: kvprobe is the receiver it is pointed to."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from kvprobe.adapter import News, Span
from kvprobe.clock import Moment, WallClock
from kvprobe.signals import FeedBatch
from kvprobe.signals.listening import parse_address
from kvprobe.signals.otlp_server import Malformed, OtlpServer, Received

SPANS_A_POLL = 2000
MOST_SPANS_WAITING = 50_000
MOST_BYTES_WAITING = 8 << 20
"""Of messages that wait for a poll; more of them are lost, and the exporter is told so."""
_MOST_WALL_NS = 1 << 62

ReadSpan = Callable[[Span, Callable[[int], Moment]], News | None]
"""As in ``adapter.Engine``."""


class OtlpFeed:
    """Listens on one port that speaks both OTLP/gRPC and OTLP/HTTP (protobuf or JSON, gzip).

    An engine is pointed to ``http://HOST:PORT`` for gRPC, to ``http://HOST:PORT/v1/traces`` for
    HTTP. A span is given to each reader in turn until one has news of it; spans without news,
    malformed messages, and messages with metrics or logs (which are accepted, so that an exporter
    that sends all three does not complain) count as ignored.

    Args:
        address: ``PORT``, listened on at 127.0.0.1 only, or ``HOST:PORT``.
        read_spans: what makes news of a span.

    Raises:
        KvprobeError: the address is taken, or none of this machine.
    """

    last_word = True

    def __init__(self, address: str, read_spans: Sequence[ReadSpan]) -> None:
        self.name = f"otlp:{address}"
        host, port = parse_address("otlp", address)
        self._read_spans = read_spans
        self._inbox = _Inbox()
        self._reading: Iterator[Span | None] = iter(())
        self._came = False
        self._server = OtlpServer(host, port, self._inbox)

    def poll(self, clock: WallClock) -> FeedBatch:
        """News of the spans that came; at most some thousand a call."""
        return self._batch(clock, SPANS_A_POLL)

    def close(self, clock: WallClock) -> FeedBatch:
        """Stop listening, cut who is still sending, and return the rest."""
        self._server.close()
        batch = self._batch(clock, sys.maxsize)
        return batch if self._came else replace(batch, notes=(f"nobody sent to {self.name}",))

    def _batch(self, clock: WallClock, most: int) -> FeedBatch:
        news: list[News] = []
        ignored, lost = self._inbox.counted()
        for span in self._spans(most):
            found = self._read(span, clock) if span is not None else None
            if found is None:
                ignored += 1
            else:
                news.append(found)
        self._came |= bool(news or ignored or lost)
        return FeedBatch(news, understood=len(news), ignored=ignored, lost=lost)

    def _spans(self, most: int) -> Iterator[Span | None]:
        while True:
            for span in self._reading:
                yield span
                most -= 1
                if not most:
                    return
            message = self._inbox.next()
            if message is None:
                return
            self._reading = spans_of(message)

    def _read(self, span: Span, clock: WallClock) -> News | None:
        for read in self._read_spans:
            try:
                news = read(span, clock.moment)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
                continue
            if news is not None:
                return news
        return None


def spans_of(message: ExportTraceServiceRequest) -> Iterator[Span | None]:
    """The spans of a message; None for one whose times no clock of our time shows."""
    for resource in message.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name")
        for scope in resource.scope_spans:
            for span in scope.spans:
                start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
                if max(start_ns, end_ns) >= _MOST_WALL_NS:
                    yield None
                    continue
                yield Span(
                    span.name,
                    start_ns,
                    end_ns,
                    _attributes(span.attributes),
                    service if isinstance(service, str) else None,
                )


_SCALARS = {"string_value", "bool_value", "int_value", "double_value"}


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind in _SCALARS:
            found[pair.key] = getattr(pair.value, kind)
    return found


class _Inbox:
    """Messages between the server's threads and the poll, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[tuple[ExportTraceServiceRequest, int, int]] = deque()
        self._spans = self._bytes = 0
        self._ignored = self._lost = 0

    def take(self, received: Received) -> bytes:
        """Keep the spans of a message; the answer to it."""
        answer = ExportTraceServiceResponse()
        if received.kind == "traces":
            message = _decoded(received)
            spans = sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans)
            refused = self._put(message, spans, len(received.body))
            if refused:
                answer.partial_success.rejected_spans = refused
                answer.partial_success.error_message = "kvprobe does not keep up"
        else:
            self.ignore()  # the empty answers of all three services are alike
        if received.json:
            return json_format.MessageToJson(answer, indent=None).encode()
        return answer.SerializeToString()

    def ignore(self) -> None:
        """Count a message that is of no use."""
        with self._lock:
            self._ignored += 1

    def counted(self) -> tuple[int, int]:
        """Messages ignored and spans lost since the last call."""
        with self._lock:
            counted = self._ignored, self._lost
            self._ignored = self._lost = 0
        return counted

    def next(self) -> ExportTraceServiceRequest | None:
        """The oldest message."""
        with self._lock:
            if not self._messages:
                return None
            message, spans, size = self._messages.popleft()
            self._spans -= spans
            self._bytes -= size
        return message

    def _put(self, message: ExportTraceServiceRequest, spans: int, size: int) -> int:
        """Keep a message whole or not at all; how many of its spans are lost."""
        with self._lock:
            full = (
                self._spans + spans > MOST_SPANS_WAITING or self._bytes + size > MOST_BYTES_WAITING
            )
            if full:
                self._lost += spans
                return spans
            self._spans += spans
            self._bytes += size
            if spans:
                self._messages.append((message, spans, size))
        return 0


def _decoded(received: Received) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    try:
        if received.json:
            # OTLP writes ids in hex, protobuf in base64: hex digits are both, and ids are not used.
            json_format.Parse(received.body.decode(), message, ignore_unknown_fields=True)
        else:
            message.ParseFromString(received.body)
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise Malformed from error
    return message
