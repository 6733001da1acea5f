"""Stands between an engine and kvprobe and keeps a copy of the spans that it forwards."""

from __future__ import annotations

import gzip
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class SpanTee:
    """An OTLP/HTTP receiver on ``port`` that hands everything on to ``forward_to``."""

    def __init__(self, port: int, forward_to: int) -> None:
        self._requests: dict[str, dict[str, float]] = {}
        handler = type("Handler", (_Handler,), {"tee": self, "forward_to": forward_to})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def latencies(self) -> dict[str, dict[str, float]]:
        """``gen_ai.latency.*`` in seconds of each request, by request id."""
        return dict(self._requests)

    def keep(self, body: bytes) -> None:
        """Note the requests of one export."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    said = {a.key: a.value for a in span.attributes}
                    if span.name == "llm_request" and "gen_ai.request.id" in said:
                        self._requests[said["gen_ai.request.id"].string_value] = {
                            key.rpartition(".")[2]: value.double_value
                            for key, value in said.items()
                            if key.startswith("gen_ai.latency.")
                        }

    def __enter__(self) -> SpanTee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    tee: ClassVar[SpanTee]
    forward_to: ClassVar[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        packed = self.headers.get("Content-Encoding") == "gzip"
        self.tee.keep(gzip.decompress(body) if packed else body)
        self.send_response(self._forward(body))
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _forward(self, body: bytes) -> int:
        """Hand on what came; nothing is missed while nobody listens."""
        kept = ("Content-Type", "Content-Encoding")
        headers = {name: self.headers[name] for name in kept if self.headers[name]}
        url = f"http://127.0.0.1:{self.forward_to}{self.path}"
        request = urllib.request.Request(url, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 200  # kvprobe is not recording at present

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
