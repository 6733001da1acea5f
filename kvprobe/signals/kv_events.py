"""Events of vLLM's KV cache (blocks stored, removed, all cleared) over ZMQ.

SGLang publishes the same. The events carry the tokens of prompts: those are skipped undecoded.
No event names a request.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvprobe.clock import WallClock
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.signals import FeedBatch
from kvprobe.signals.listening import LOOPBACK, cannot_listen

MESSAGES_A_POLL = 500
BYTES_A_POLL = 16 << 20
MOST_MESSAGE_BYTES = 64 << 20
"""A million tokens are 5 MB. ZMQ ends the connection on which a longer message comes."""
MOST_WAITING = 1000
"""Messages that wait in the socket; an engine drops more, which shows as a gap."""
_SECOND_NS = 1_000_000_000
_MOST_MEDIA = 32
_MOST_PUBLISHERS = 64
_LONGEST_GAP = 1_000_000
_BIND = "bind:"

STORED, REMOVED, CLEARED = "kv_blocks_stored", "kv_blocks_removed", "kv_caches_cleared"


class _Batch(msgspec.Struct, array_like=True):
    """``[time, events, data parallel rank ..]``."""

    time: float
    events: list[msgspec.Raw]


# vLLM 0.32 writes events as maps; before, and in SGLang, they are arrays. What is not named here is
# skipped without being decoded.


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    block_size: int = 0
    medium: str | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    block_size: int = 0
    lora: msgspec.Raw = msgspec.Raw()
    medium: str | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_BATCH = msgspec.msgpack.Decoder(_Batch)
_EVENT = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_EVENT_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_UNDECODABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class KVEventsFeed:
    """Counts blocks by the medium that they were stored on or removed from.

    Rows of ``host``, cumulative since the feed was opened, at most one a second for each that
    changed: ``kv_blocks_stored`` and ``kv_blocks_removed`` with the medium (``GPU``, ``CPU``,
    ``STORAGE`` ..; empty where the engine does not say) as subject, ``kv_caches_cleared``. A
    counter's first row is 0, from before its first event.

    ``understood`` and ``ignored`` count events, ``lost`` messages (of some events each) that are
    missing between two that came from one publisher. Tokens of a unit are told where vLLM
    describes a chunk that it stored on STORAGE, and all such chunks were alike.

    Args:
        endpoint: the other side of the engine's. An engine that binds (vLLM with ``*`` in its
            endpoint, its default) is connected to: ``tcp://HOST:PORT``, or as the engine has it,
            ``tcp://*:PORT``. An engine that connects (no ``*``) needs kvprobe to bind:
            ``bind:tcp://HOST:PORT``. ``ipc://PATH`` likewise.

    Raises:
        KvprobeError: the endpoint is none, or taken.
    """

    last_word = False

    def __init__(self, endpoint: str, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.name = f"kv-events:{endpoint}"
        self._now = now
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = _opened(self._context, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._publishers = _Publishers()
        self._counters = _Counters(now())
        self._unit = _Unit()
        self._understood = self._ignored = self._lost = 0
        self._came = False

    def poll(self, clock: WallClock) -> FeedBatch:
        """What changed; takes at most some hundred messages."""
        self._receive(MESSAGES_A_POLL, BYTES_A_POLL)
        return self._batch(last=False)

    def close(self, clock: WallClock) -> FeedBatch:
        """Take what waits in the socket, and close it."""
        self._receive(2 * MOST_WAITING, 16 * BYTES_A_POLL)
        self._context.destroy(linger=0)
        return self._batch(last=True)

    def _receive(self, messages: int, size: int) -> None:
        while messages > 0 and size > 0:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # Again: nothing is there
                return
            messages -= 1
            size -= sum(map(len, frames))
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        self._came = True
        if len(frames) != 3 or len(frames[1]) != 8:
            self._ignored += 1
            return
        topic, number, payload = frames
        self._lost += self._publishers.missing(topic, int.from_bytes(number))
        try:
            events = _BATCH.decode(payload).events
        except _UNDECODABLE:
            self._ignored += 1
            return
        for event in events:
            understood = self._count(bytes(event))
            self._understood += understood
            self._ignored += not understood

    def _count(self, data: bytes) -> bool:
        try:
            event: Any = (_EVENT if _is_map(data) else _EVENT_ARRAY).decode(data)
        except _UNDECODABLE:
            return False
        match event:
            case _Stored() | _StoredArray():
                if isinstance(event, _Stored):
                    self._unit.take(event)
                return self._counters.add(STORED, event.medium, len(event.block_hashes))
            case _Removed() | _RemovedArray():
                return self._counters.add(REMOVED, event.medium, len(event.block_hashes))
            case _:
                return self._counters.add(CLEARED, None, 1)

    def _batch(self, last: bool) -> FeedBatch:
        facts = self._unit.news()
        batch = FeedBatch(
            news=[] if facts is None else [facts],
            counters=self._counters.rows(self._now(), last),
            understood=self._understood,
            ignored=self._ignored,
            lost=self._lost,
            notes=[f"no message came from {self.name}"] if last and not self._came else [],
        )
        self._understood = self._ignored = self._lost = 0
        return batch


def _is_map(data: bytes) -> bool:
    """Whether a msgpack value is a map."""
    return 0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF)


def _opened(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    address = endpoint.removeprefix(_BIND)
    binds = address != endpoint
    if not address.startswith(("tcp://", "ipc://")):
        raise KvprobeError(
            f"kv-events:{endpoint} is no endpoint",
            "tcp://HOST:PORT to connect to an engine that binds; bind:tcp://HOST:PORT otherwise",
        )
    if not binds:
        address = address.replace("tcp://*:", f"tcp://{LOOPBACK}:")
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVHWM, MOST_WAITING)
    subscriber.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
    subscriber.setsockopt(zmq.IPV6, int("[" in address))
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        if binds:
            subscriber.bind(address)
        else:
            subscriber.connect(address)
    except zmq.ZMQError as error:
        port = address.rpartition(":")[2]
        raise cannot_listen(
            address,
            int(port) if port.isascii() and port.isdigit() else None,
            error.errno,
            f"is it the engine's own? then kv-events:{address}, to connect; else another port",
        ) from None
    return subscriber


class _Publishers:
    """The last number that each publisher gave a message.

    A message names no publisher, only a topic that several may share (one for each data parallel
    rank, or two engines that connect to one address): it is the next of the one whose last number
    is nearest below its own. What a publisher sent before the first that came is not missing, as
    it may have been sent before we listened.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def missing(self, topic: bytes, number: int) -> int:
        """How many messages are missing before this one."""
        before = max(
            (last for of, last in self._last if of == topic and last < number), default=None
        )
        gap = 0
        if before is not None and number - before <= _LONGEST_GAP:
            del self._last[topic, before]
            gap = number - before - 1
        self._last[topic, number] = None
        self._last.move_to_end((topic, number))
        if len(self._last) > _MOST_PUBLISHERS:
            self._last.popitem(last=False)
        return gap


class _Counters:
    """Cumulative counters and the rows they make."""

    def __init__(self, now_ns: int) -> None:
        self._looked_ns = now_ns
        self._values: dict[tuple[str, str], int] = {}
        self._written: dict[tuple[str, str], int] = {}

    def add(self, metric: str, medium: str | None, count: int) -> bool:
        """Count; False for a medium beyond the number that any engine has."""
        key = metric, medium or ""
        if key not in self._values and len(self._values) >= _MOST_MEDIA:
            return False
        self._values[key] = self._values.get(key, 0) + count
        return True

    def rows(self, now_ns: int, last: bool) -> list[dict[str, Any]]:
        """Rows of ``host`` for what changed, if a second has passed; for all at the end."""
        if not last and now_ns - self._looked_ns < _SECOND_NS:
            return []
        rows = []
        for key, value in self._values.items():
            if key not in self._written:
                rows.append(_row(self._looked_ns, key, 0))
            if last or self._written.get(key) != value:
                rows.append(_row(now_ns, key, value))
            self._written[key] = value
        self._looked_ns = now_ns
        return rows


def _row(time_ns: int, key: tuple[str, str], value: int) -> dict[str, Any]:
    return {"time_ns": time_ns, "metric": key[0], "subject": key[1], "value": float(value)}


class _Unit:
    """Tokens of one of vLLM's stored chunks: an event that describes itself is of one chunk."""

    def __init__(self) -> None:
        self._tokens: set[int] = set()
        self._said = False

    def take(self, event: _Stored) -> None:
        tokens = len(event.block_hashes) * event.block_size
        describes_itself = event.kv_cache_spec_kind is not None and tokens > 0
        if event.medium == "STORAGE" and describes_itself and len(self._tokens) < 2:
            self._tokens.add(tokens)

    def news(self) -> EngineFacts | None:
        """Facts, once, if all chunks so far were alike."""
        if self._said or len(self._tokens) != 1:
            return None
        self._said = True
        return EngineFacts("vllm", unit_tokens=next(iter(self._tokens)))
