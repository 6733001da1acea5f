"""One port that speaks OTLP over gRPC and over HTTP/1.1.

An HTTP/2 connection begins with what an HTTP/1.1 server reads as a request line. Such a
connection is carried to the gRPC server, which listens on a socket that has no name in any file
system; every other one is answered here.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import secrets
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, Protocol

from kvprobe.signals.listening import cannot_listen

# gRPC's own log goes to stderr, where the dashboard is.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc  # type: ignore[import-untyped]

MOST_BYTES = 4 << 20
"""Of one message, as sent and unpacked: what a gRPC server takes unless it is told otherwise.

A hostile one of this size takes 100 times as much memory while it is decoded.
"""
MOST_CONNECTIONS = 128
MOST_CALLS = 32
"""gRPC calls at a time."""
PATIENCE_S = 60.0
"""From one answer on a connection to the next."""
_GRPC_CONNECTION_MS = 600_000
_CLOSE_S = 2.0
_LOOK_S = 0.25
_PIECE = 1 << 16
_HTTP2 = b"PRI * HTTP/2.0\r\n"
_SERVICES = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}
_JSON = "application/json"
_PROTOBUF = "application/x-protobuf"


class Received(NamedTuple):
    """One message: its ``kind`` is traces, metrics or logs."""

    kind: str
    body: bytes
    json: bool = False


class Malformed(Exception):
    """A body that does not decode."""


class Inbox(Protocol):
    """What messages are handed to; called from several threads."""

    def take(self, received: Received) -> bytes:
        """Take a message and return the answer's body.

        Raises:
            Malformed: it does not decode.
        """
        ...

    def ignore(self) -> None:
        """Count a message that never gets to ``take``, or is malformed."""
        ...


class OtlpServer:
    """Listens from the beginning until ``close``.

    Raises:
        KvprobeError: the address is taken, or none of this machine.
    """

    def __init__(self, host: str, port: int, inbox: Inbox) -> None:
        where = f"port {port} of {host}"
        name = f"kvprobe-otlp-{secrets.token_hex(8)}"
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._http = _HttpServer(address, family, inbox, name)
        except OSError as error:
            number = None if isinstance(error, socket.gaierror) else error.errno
            instead = "give another port, and point the engine to it"
            raise cannot_listen(where, port, number, instead) from None
        self._calls = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="kvprobe-otlp-grpc")
        self._grpc = _grpc_server(self._calls, inbox)
        self._grpc.add_insecure_port(f"unix-abstract:{name}")
        self._grpc.start()
        self._loop = threading.Thread(
            target=self._http.serve_forever, args=(_LOOK_S,), name="kvprobe-otlp", daemon=True
        )
        self._loop.start()

    def close(self) -> None:
        """Stop listening; calls that are being answered may end, who is slow is cut."""
        self._http.shutdown()
        self._loop.join()
        ended = self._grpc.stop(grace=_LOOK_S).wait(_CLOSE_S)
        self._calls.shutdown(wait=ended)
        self._http.server_close()


# ---------------------------------------------------------------- gRPC


def _grpc_server(calls: ThreadPoolExecutor, inbox: Inbox) -> Any:
    handlers = [
        grpc.method_handlers_generic_handler(
            service, {"Export": grpc.unary_unary_rpc_method_handler(_call(kind, inbox))}
        )
        for kind, service in _SERVICES.items()
    ]
    options = (
        ("grpc.max_receive_message_length", MOST_BYTES),
        ("grpc.max_concurrent_streams", 8),
        # A call whose end never comes holds a thread: until its connection is too old.
        ("grpc.max_connection_age_ms", _GRPC_CONNECTION_MS),
        ("grpc.max_connection_age_grace_ms", int(PATIENCE_S * 1000)),
    )
    return grpc.server(calls, handlers, options=options, maximum_concurrent_rpcs=MOST_CALLS)


def _call(kind: str, inbox: Inbox) -> Callable[[bytes, Any], bytes]:
    def export(body: bytes, context: Any) -> bytes:
        try:
            return inbox.take(Received(kind, body))
        except Malformed:
            inbox.ignore()
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            return b""

    return export


# ---------------------------------------------------------------- HTTP


class _Connection(NamedTuple):
    thread: threading.Thread
    deadline: float


class _HttpServer(ThreadingHTTPServer):
    """A thread a connection, a limit to their number, and an end to each."""

    request_queue_size = MOST_CONNECTIONS
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Any, family: int, inbox: Inbox, grpc_name: str) -> None:
        self.address_family = family
        self.inbox = inbox
        self.grpc_name = grpc_name
        self._open: dict[socket.socket, _Connection] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, and ask no name server for our name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvprobe", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection."""
        return len(self._open) < MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own."""
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        with self._lock:
            self._open[request] = _Connection(thread, time.monotonic() + PATIENCE_S)
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Close one connection."""
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def give_time(self, request: Any, seconds: float) -> None:
        """Let a connection go on for so long."""
        with self._lock:
            if request in self._open:
                self._open[request] = self._open[request]._replace(
                    deadline=time.monotonic() + seconds
                )

    def service_actions(self) -> None:
        """Cut who took too long: called several times a second."""
        self._cut(time.monotonic())

    def server_close(self) -> None:
        """Close the port and every connection."""
        super().server_close()
        with self._lock:
            threads = [connection.thread for connection in self._open.values()]
        self._cut(float("inf"))
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that went away is no event."""

    def _cut(self, now: float) -> None:
        with self._lock:
            for request, connection in self._open.items():
                if connection.deadline <= now:
                    try:
                        request.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue


class _Refused(Exception):
    """A request that is answered with a status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE_S
    disable_nagle_algorithm = True
    wbufsize = -1
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Parse an HTTP/1.1 request; carry HTTP/2 to the gRPC server until its end."""
        if self.raw_requestline == _HTTP2:
            self._carry()
            return False
        return super().parse_request()

    def do_POST(self) -> None:
        """Take one message."""
        kind = self.path.partition("?")[0].removeprefix("/v1/")
        content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            body = _unpacked(self._body(), self.headers.get("Content-Encoding", ""))
            if kind not in _SERVICES:
                raise _Refused(HTTPStatus.NOT_FOUND)
            if content_type not in (_JSON, _PROTOBUF):
                raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            status = HTTPStatus.OK
            answer = self.server.inbox.take(Received(kind, body, content_type == _JSON))
        except (Malformed, _Refused) as error:
            self.server.inbox.ignore()
            status = error.status if isinstance(error, _Refused) else HTTPStatus.BAD_REQUEST
            answer = b""
        self.send_response(status)
        self.send_header("Content-Type", _JSON if content_type == _JSON else _PROTOBUF)
        self.send_header("Content-Length", str(len(answer)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)
        self.server.give_time(self.connection, PATIENCE_S)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request is no event."""

    def version_string(self) -> str:
        """What the answer says of the server."""
        return "kvprobe"

    def _body(self) -> bytes:
        """The whole body; one that is too long is read to its end, so that the answer is read."""
        body = bytearray()
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := self._chunk_size():
                self._read(size, body)
                self._line()
            while self._line():  # trailers
                pass
        elif length.isascii() and length.isdigit() and len(length) < 16:
            self._read(int(length), body)
        else:
            self.close_connection = True
            raise _Refused(HTTPStatus.LENGTH_REQUIRED)
        if len(body) > MOST_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return bytes(body)

    def _read(self, length: int, body: bytearray) -> None:
        while length:
            data = self.rfile.read(min(length, _PIECE))
            if not data:
                raise ConnectionAbortedError
            length -= len(data)
            if len(body) <= MOST_BYTES:
                body += data

    def _chunk_size(self) -> int:
        digits = self._line().partition(b";")[0].strip()
        if len(digits) < 16 and re.fullmatch(rb"[0-9A-Fa-f]+", digits):
            return int(digits, 16)
        self.close_connection = True
        raise Malformed

    def _line(self) -> bytes:
        line = self.rfile.readline(1024)
        if not line.endswith(b"\n"):
            raise ConnectionAbortedError
        return line.strip()

    def _carry(self) -> None:
        self.close_connection = True
        with socket.socket(socket.AF_UNIX) as far:
            far.settimeout(PATIENCE_S)
            far.connect(b"\0" + self.server.grpc_name.encode())
            far.sendall(_HTTP2 + self.rfile.read1(_PIECE))
            self.server.give_time(self.connection, float("inf"))
            _exchange(self.connection, far)


def _exchange(near: socket.socket, far: socket.socket) -> None:
    """Carry bytes both ways until one side ends."""
    ways = {near.fileno(): (near, far), far.fileno(): (far, near)}
    ready = select.poll()
    for descriptor in ways:
        ready.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            source, sink = ways[descriptor]
            data = source.recv(_PIECE)
            if not data:
                return
            sink.sendall(data)


def _unpacked(body: bytes, encoding: str) -> bytes:
    """The body without its compression, of which no more is unpacked than is allowed."""
    try:
        match encoding.strip().lower():
            case "" | "identity":
                return body
            case "gzip":
                with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
                    data = file.read(MOST_BYTES + 1)
            case "deflate":
                unpacker = zlib.decompressobj()
                data = unpacker.decompress(body, MOST_BYTES + 1)
                if len(data) <= MOST_BYTES and not unpacker.eof:
                    raise Malformed
            case _:
                raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    except (OSError, EOFError, zlib.error) as error:
        raise Malformed from error
    if len(data) > MOST_BYTES:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return data
