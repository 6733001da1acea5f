"""KV events over real ZMQ sockets, in both encodings, with gaps and strangers, exactly counted."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.clock import ClockSample, WallClock
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.schema import HOST
from kvprobe.signals import FeedBatch, kv_events
from kvprobe.signals.kv_events import KVEventsFeed

RECORDED = Path(__file__).parents[1] / "data/engines/vllm/kv-events.jsonl"
CLOCK = WallClock(lambda: ClockSample(7, 1_000_003, 11))
SECOND_NS = 1_000_000_000
START_NS = 1_000_000_007
encode = msgspec.msgpack.Encoder().encode
Message = tuple[bytes, int, bytes]


# As the engine declares them (its names and order are the wire format).


class EngineBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


def stored(blocks: int, medium: str | None, tokens: int = 128, **more: Any) -> BlockStored:
    hashes: list[int | bytes] = [2**64 - 1 - n for n in range(blocks)]
    return BlockStored(hashes, None, list(range(blocks * tokens)), tokens, None, medium, **more)


def removed(blocks: int, medium: str | None) -> BlockRemoved:
    return BlockRemoved([bytes([n]) * 32 for n in range(blocks)], medium)


def as_array(event: Any) -> list[Any]:
    """The same event as engines encoded it before."""
    values = [getattr(event, name) for name in event.__struct_fields__]
    return [type(event).__name__, *values]


class Engine:
    """A publisher as vLLM has it, and the feed that hears it."""

    def __init__(self, engine_binds: bool = True) -> None:
        self.context = zmq.Context()
        self.now_ns = START_NS
        self.batches: list[FeedBatch] = []
        self.sent = 0
        self.publisher = self.new_publisher()
        if engine_binds:
            self.port = self.publisher.bind_to_random_port("tcp://127.0.0.1")
            self.endpoint = f"tcp://127.0.0.1:{self.port}"
        else:
            self.port = free_port()
            self.endpoint = f"bind:tcp://127.0.0.1:{self.port}"
        self.feed = KVEventsFeed(self.endpoint, lambda: self.now_ns)
        if not engine_binds:
            self.publisher.connect(self.endpoint.removeprefix("bind:"))
        self.meet(self.publisher)

    def new_publisher(self) -> zmq.Socket[bytes]:
        publisher = self.context.socket(zmq.XPUB)
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        return publisher

    def meet(self, publisher: zmq.Socket[bytes]) -> None:
        """Wait for the subscription, which polls send: what is sent before it goes nowhere."""
        end = time.monotonic() + 5
        while not publisher.poll(5):
            assert time.monotonic() < end, "never subscribed"
            self.batches.append(self.feed.poll(CLOCK))
        assert publisher.recv() == b"\x01"

    def send(self, *events: Any, topic: bytes = b"", number: int | None = None) -> None:
        batch = EngineBatch(1796145723.44, list(events), 0)
        number = self.sent if number is None else number
        self.publisher.send_multipart([topic, number.to_bytes(8, "big"), encode(batch)])
        self.sent += 1

    def hear(self, understood: int, ignored: int = 0) -> FeedBatch:
        """Poll until that many more events came."""
        end = time.monotonic() + 5
        goal = sum(self.counts[:2]) + understood + ignored
        while sum(self.counts[:2]) < goal:
            assert time.monotonic() < end, "never came"
            self.batches.append(self.feed.poll(CLOCK))
            time.sleep(0.001)
        assert self.counts[:2] == (self.understood + understood, self.ignored + ignored)
        self.understood, self.ignored = self.counts[:2]
        return self.batches[-1]

    understood = ignored = 0

    def a_second_later(self) -> list[tuple[int, str, str, float]]:
        """The rows of the next poll, a second on."""
        self.now_ns += SECOND_NS
        self.batches.append(self.feed.poll(CLOCK))
        return rows(self.batches[-1])

    @property
    def counts(self) -> tuple[int, int, int]:
        return (
            sum(b.understood for b in self.batches),
            sum(b.ignored for b in self.batches),
            sum(b.lost for b in self.batches),
        )

    @property
    def news(self) -> list[Any]:
        return [news for batch in self.batches for news in batch.news]

    def close(self) -> None:
        self.context.destroy(linger=0)
        if not self.feed._context.closed:
            self.batches.append(self.feed.close(CLOCK))


def rows(batch: FeedBatch) -> list[tuple[int, str, str, float]]:
    assert all(set(row) == {c.name for c in HOST.columns} for row in batch.counters)
    return sorted(
        (row["time_ns"], row["metric"], row["subject"], row["value"]) for row in batch.counters
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(params=[True, False], ids=["engine binds", "engine connects"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = Engine(request.param)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def one() -> Iterator[Engine]:
    found = Engine()
    try:
        yield found
    finally:
        found.close()


# ---------------------------------------------------------------- counters


@pytest.mark.parametrize("form", [lambda event: event, as_array], ids=["maps", "arrays"])
def test_blocks_by_medium(engine: Engine, form: Any) -> None:
    engine.send(form(stored(7, "GPU")), form(removed(3, "CPU")))
    engine.send(form(stored(5, "STORAGE")), form(AllBlocksCleared()), form(stored(11, "GPU")))
    engine.hear(5)
    later = START_NS + SECOND_NS
    expected = {
        ("kv_blocks_stored", "GPU"): 18.0,
        ("kv_blocks_removed", "CPU"): 3.0,
        ("kv_blocks_stored", "STORAGE"): 5.0,
        ("kv_caches_cleared", ""): 1.0,
    }
    assert engine.a_second_later() == sorted(
        [(START_NS, *key, 0.0) for key in expected]
        + [(later, *key, value) for key, value in expected.items()]
    )
    engine.send(form(removed(2, "CPU")))
    engine.hear(1)
    assert engine.a_second_later() == [
        (later + SECOND_NS, "kv_blocks_removed", "CPU", 5.0),
    ]
    engine.send(form(stored(1, None)))
    engine.now_ns += 17
    time.sleep(0.1)
    last = engine.feed.close(CLOCK)
    end = later + SECOND_NS + 17
    assert rows(last) == sorted(
        [(end, *key, value) for key, value in expected.items() if key[1] != "CPU"]
        + [(end, "kv_blocks_removed", "CPU", 5.0)]
        + [(end - 17, "kv_blocks_stored", "", 0.0), (end, "kv_blocks_stored", "", 1.0)]
    )
    assert (last.understood, last.ignored, last.lost) == (1, 0, 0)


def test_recorded_events_of_vllm(one: Engine) -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    expected: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for event in line["batch"][1]:
            kind = event["type"].removeprefix("Block").lower()
            if kind == "allblockscleared":
                expected["kv_caches_cleared", ""] += 1
            else:
                expected[f"kv_blocks_{kind}", event["medium"]] += len(event["block_hashes"])
        frames = [line["topic"].encode(), line["seq"].to_bytes(8, "big"), encode(line["batch"])]
        one.publisher.send_multipart(frames)
    events = sum(len(line["batch"][1]) for line in lines)
    assert events > 70
    one.hear(events)
    made = {(metric, subject): value for _, metric, subject, value in one.a_second_later()}
    assert made == dict(expected)
    assert one.counts == (events, 0, 0)
    assert one.news == [EngineFacts("vllm", unit_tokens=128)]


def test_topics_and_data_parallel_ranks_are_all_heard(one: Engine) -> None:
    for topic in (b"", b"kv-events", b"kv@pod-1@model"):
        one.send(stored(2, "GPU"), topic=topic)
    one.publisher.send_multipart(
        [b"", (9).to_bytes(8, "big"), encode([1.0, [removed(1, "GPU")], 3])]
    )
    one.publisher.send_multipart([b"", (9).to_bytes(8, "big"), encode([1.0, [removed(1, "GPU")]])])
    one.hear(5)


def test_a_big_batch(one: Engine) -> None:
    tokens = list(range(1_000_003))
    one.send(BlockStored(list(range(7817)), None, tokens, 128, None, "GPU"))
    one.hear(1)
    one.send(*[stored(1, "CPU") for _ in range(10_007)])
    began = time.perf_counter()
    one.hear(10_007)
    assert time.perf_counter() - began < 2
    assert [row[3] for row in one.a_second_later() if row[3]] == [10_007.0, 7817.0]


def test_no_token_of_a_prompt_is_kept(one: Engine) -> None:
    token = 1_234_567_891
    event = BlockStored(
        [1], None, [token] * 128, 128, None, "STORAGE", "name", [("key",)], 0, "full"
    )
    one.send(event, as_array(event))
    one.hear(2)
    one.a_second_later()
    for batch in one.batches:
        assert str(token) not in repr(batch)
    for event_type in (kv_events._EVENT, kv_events._EVENT_ARRAY):
        kept = event_type.decode(
            encode(event if event_type is kv_events._EVENT else as_array(event))
        )
        assert str(token) not in repr(msgspec.structs.asdict(kept))


# ---------------------------------------------------------------- facts


@pytest.mark.parametrize(
    ("events", "unit"),
    [
        ([stored(1, "STORAGE", kv_cache_spec_kind="full_attention")], 128),
        ([stored(8, "STORAGE", 16, kv_cache_spec_kind="full_attention")], 128),
        ([stored(1, "STORAGE", kv_cache_spec_kind="full_attention")] * 3, 128),
        # Not described, so perhaps several chunks; another medium; chunks that differ.
        ([stored(1, "STORAGE")], None),
        ([stored(1, "STORAGE", 0, kv_cache_spec_kind="full_attention")], None),
        ([stored(1, "CPU", kv_cache_spec_kind="full_attention")], None),
        ([as_array(stored(1, "STORAGE", kv_cache_spec_kind="full_attention"))], None),
        (
            [
                stored(1, "STORAGE", kv_cache_spec_kind="full_attention"),
                stored(2, "STORAGE", kv_cache_spec_kind="full_attention"),
            ],
            None,
        ),
    ],
)
def test_tokens_of_a_unit_are_told_where_they_are_sure(
    one: Engine, events: list[Any], unit: int | None
) -> None:
    one.send(*events)
    one.hear(len(events))
    one.send(*events)
    one.hear(len(events))
    assert one.news == ([] if unit is None else [EngineFacts("vllm", unit_tokens=unit)])


# ---------------------------------------------------------------- gaps


def missing(numbers: Sequence[int], topic: bytes = b"") -> int:
    publishers = kv_events._Publishers()
    return sum(publishers.missing(topic, number) for number in numbers)


def test_gaps_are_counted(one: Engine) -> None:
    for number in [5, 6, 7, 11, 12, 113, 114]:
        one.send(AllBlocksCleared(), number=number)
    one.hear(7)
    assert one.counts == (7, 0, 3 + 100)


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [
        ([1000, 1001], 0),  # what came before the first is not known to be for us
        ([1000, 0, 1, 2], 0),  # a restart
        ([1000, 0, 1, 4], 2),
        ([1000, 5, 1001, 6, 1002, 7], 0),  # two engines that connect to one address
        ([1000, 5, 1003, 6, 1004, 9], 2 + 2),
        ([7, 2**64 - 1, 8], 0),  # no gap of that length is believed
    ],
)
def test_gaps_of_several_publishers(numbers: list[int], lost: int) -> None:
    assert missing(numbers) == lost


def test_each_topic_is_numbered_for_itself() -> None:
    publishers = kv_events._Publishers()
    found = [publishers.missing(t, n) for t, n in [(b"a", 1), (b"b", 9), (b"a", 4), (b"b", 10)]]
    assert found == [0, 0, 2, 0]


def test_publishers_are_bounded() -> None:
    publishers = kv_events._Publishers()
    for number in range(1009):
        assert publishers.missing(b"", number << 32) == 0
    assert len(publishers._last) == kv_events._MOST_PUBLISHERS
    assert publishers.missing(b"", (1008 << 32) + 3) == 2


# ---------------------------------------------------------------- strangers


def test_garbage_is_counted_and_harms_nothing(one: Engine) -> None:
    noise = random.Random(7)
    frames: list[list[bytes]] = [
        *([b"", n.to_bytes(8, "big"), b"\xc1" + noise.randbytes(n)] for n in range(101)),
        [b"alone"],
        [b"", b"short", b""],
        [b"", bytes(8), encode([1.0, []]), b"one more"],
        [b"", (101).to_bytes(8, "big"), b""],
        [b"", (102).to_bytes(8, "big"), encode({"ts": 1.0, "events": []})],
        [b"", (103).to_bytes(8, "big"), encode(["now", []])],
        [b"", (104).to_bytes(8, "big"), encode([1.0, 5])],
        [b"", (105).to_bytes(8, "big"), b"\x91" * 100_000],
    ]
    for each in frames:
        one.publisher.send_multipart(each)
    one.hear(0, len(frames))
    strange: list[Any] = [
        None,
        5,
        "BlockStored",
        [],
        {},
        ["BlockMoved", []],
        {"type": "BlockMoved"},
        {"type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": 5},
        {"type": "BlockStored", "block_hashes": ["x"]},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": 3},
        ["BlockStored", [1], None, [], "x"],
        {"type": ["BlockStored"]},
    ]
    one.send(*strange, stored(3, "GPU"), number=106)
    one.hear(1, len(strange))
    assert [row[1:] for row in one.a_second_later() if row[3]] == [("kv_blocks_stored", "GPU", 3.0)]
    assert one.counts[2] == 0


@given(st.binary(max_size=200))
def test_no_payload_raises(payload: bytes) -> None:
    feed = KVEventsFeed.__new__(KVEventsFeed)
    feed._publishers, feed._counters = kv_events._Publishers(), kv_events._Counters(0)
    feed._unit, feed._understood, feed._ignored, feed._lost = kv_events._Unit(), 0, 0, 0
    feed._take([b"", bytes(8), payload])
    feed._take([b"", bytes(8), encode([1.0, [msgspec.Raw(payload or b"\xc0")]])])
    assert feed._understood + feed._ignored >= 1


def test_media_are_bounded(one: Engine) -> None:
    one.send(*[stored(1, f"medium {number}") for number in range(101)])
    one.hear(32, 69)
    assert len(one.a_second_later()) == 2 * 32


def test_a_message_that_is_too_long_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_MESSAGE_BYTES", 100_003)
    engine = Engine(engine_binds=False)
    try:
        engine.send(stored(1, "GPU"))
        engine.hear(1)
        engine.publisher.send_multipart([b"", (1).to_bytes(8, "big"), bytes(100_004)])
        engine.meet(engine.publisher)  # it is cut, and comes again
        engine.send(stored(1, "GPU"), number=2)
        engine.hear(1)
        assert engine.counts == (2, 0, 1)
    finally:
        engine.close()


# ---------------------------------------------------------------- bounds


def test_a_poll_does_a_bounded_work(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MESSAGES_A_POLL", 7)
    for _ in range(17):
        one.send(AllBlocksCleared())
    time.sleep(0.2)
    assert [one.feed.poll(CLOCK).understood for _ in range(4)] == [7, 7, 3, 0]
    monkeypatch.setattr(kv_events, "BYTES_A_POLL", 2000)
    for _ in range(5):
        one.send(stored(1, "GPU", 400))
    time.sleep(0.2)
    assert [one.feed.poll(CLOCK).understood for _ in range(3)] == [3, 2, 0]


def test_close_takes_what_waits_and_a_silent_poll_is_quick(one: Engine) -> None:
    began = time.perf_counter()
    for _ in range(1000):
        one.feed.poll(CLOCK)
    assert time.perf_counter() - began < 1
    for _ in range(997):
        one.send(stored(2, "GPU"))
    time.sleep(0.3)
    last = one.feed.close(CLOCK)
    assert (last.understood, last.lost) == (997, 0)
    assert [row[3] for row in rows(last)] == [0.0, 1994.0]


def test_an_engine_that_restarts_is_heard_again(one: Engine) -> None:
    one.send(stored(2, "GPU"), number=100)
    one.hear(1)
    one.publisher.close()
    one.publisher = one.new_publisher()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            one.publisher.bind(one.endpoint)
            break
        except zmq.ZMQError:
            time.sleep(0.01)
    one.meet(one.publisher)
    one.send(stored(3, "GPU"), number=0)
    one.hear(1)
    assert one.counts == (2, 0, 0)
    assert one.a_second_later()[-1][3] == 5.0


# ---------------------------------------------------------------- endpoints


def test_the_engines_own_endpoint_with_a_star_is_connected_to(one: Engine) -> None:
    feed = KVEventsFeed(f"tcp://*:{one.port}")
    try:
        one.meet(one.publisher)
        one.send(stored(2, "GPU"))
        end = time.monotonic() + 5
        while not feed.poll(CLOCK).understood:
            assert time.monotonic() < end
    finally:
        assert not feed.close(CLOCK).notes
    assert feed.name == f"kv-events:tcp://*:{one.port}"


def test_sockets_in_the_file_system(tmp_path: Path) -> None:
    feed = KVEventsFeed(f"bind:ipc://{tmp_path}/events")
    context = zmq.Context()
    try:
        publisher = context.socket(zmq.XPUB)
        publisher.connect(f"ipc://{tmp_path}/events")
        while not publisher.poll(5):
            feed.poll(CLOCK)
        publisher.send_multipart([b"", bytes(8), encode([1.0, [AllBlocksCleared()]])])
        end = time.monotonic() + 5
        while not feed.poll(CLOCK).understood:
            assert time.monotonic() < end
    finally:
        context.destroy(linger=0)
        feed.close(CLOCK)


def test_a_port_in_use_says_by_whom(one: Engine) -> None:
    with pytest.raises(KvprobeError) as error:
        KVEventsFeed(f"bind:{one.endpoint}")
    assert f"{one.endpoint} is taken by" in error.value.message
    assert f"(PID {os.getpid()})" in error.value.message
    assert f"kv-events:{one.endpoint}, to connect" in error.value.hint


@pytest.mark.parametrize(
    "endpoint",
    ["", "5557", "127.0.0.1:5557", "bind:5557", "udp://127.0.0.1:5557", "inproc://x", "bind:"],
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(KvprobeError, match="is no endpoint"):
        KVEventsFeed(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://:", "bind:tcp://192.0.2.1:5557"]
)
def test_what_cannot_be_opened(endpoint: str) -> None:
    with pytest.raises(KvprobeError) as error:
        KVEventsFeed(endpoint)
    assert endpoint.removeprefix("bind:") in error.value.message


def test_nobody_there() -> None:
    feed = KVEventsFeed(f"tcp://127.0.0.1:{free_port()}")
    assert feed.poll(CLOCK) == FeedBatch(news=[], counters=[], notes=[])
    assert list(feed.close(CLOCK).notes) == [f"no message came from {feed.name}"]
