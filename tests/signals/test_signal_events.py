"""The event reader: exact rows and counts, whatever the file looks like."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import SignalBatch
from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines import engines
from kvprobe.model import EngineFacts
from kvprobe.schema import REQUESTS, UNKNOWN
from kvprobe.signals.events import EventSignal
from kvprobe.signals.lines import MAX_LINE_BYTES, LineFollower

ENGINE: dict[str, Any] = {
    "event": "engine",
    "name": "kvprobe-workload",
    "unit_tokens": 16,
    "unit_bytes": 16 * 2048,
    "bytes_per_token": 2048,
    "reads_in_flight": 3,
    "direct": False,
    "prefetch": True,
    "prefill": "modelled",
    "layout": "vllm",
}
NAMES = ("arrival", "scheduled", "prefill_start", "prefill_end", "first_token", "finish")


def life(request: str, start_ns: int = 1_000_003) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"event": name, "id": request, "t_ns": start_ns + 101 * place}
        for place, name in enumerate(NAMES)
    ]
    rows[0]["prompt_tokens"] = 1009
    rows[2] |= {"device_hit_tokens": 0, "storage_hit_tokens": 496, "computed_tokens": 513}
    return rows


def row_of(request: str, start_ns: int = 1_000_003) -> dict[str, Any]:
    return {
        "id": request,
        "arrival_ns": start_ns,
        "scheduled_ns": start_ns + 101,
        "prefill_start_ns": start_ns + 202,
        "prefill_end_ns": start_ns + 303,
        "first_token_ns": start_ns + 404,
        "prompt_tokens": 1009,
        "device_hit_tokens": 0,
        "storage_hit_tokens": 496,
        "computed_tokens": 513,
        "host_hit_tokens": UNKNOWN,
        "offload_hit_tokens": UNKNOWN,
        "uncertainty_ns": 0,
    }


def text(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(tmp_path: Path, data: bytes) -> tuple[SignalBatch, SignalBatch]:
    path = tmp_path / "events.jsonl"
    path.write_bytes(data)
    signal = EventSignal(str(path))
    return signal.poll(), signal.close()


def test_a_whole_life_is_one_row(tmp_path: Path) -> None:
    polled, closed = read(tmp_path, text(ENGINE, *life("a")))
    assert list(polled.requests) == [row_of("a")]
    assert set(polled.requests[0]) == {column.name for column in REQUESTS.columns}
    assert (polled.understood, polled.ignored) == (7, 0)
    assert polled.engine == EngineFacts(
        "kvprobe-workload", None, 16, 32768, 2048, 3, False, None, True, "modelled"
    )
    assert closed == SignalBatch([], [], None, 0, 0)


def test_nothing_is_told_twice_and_open_requests_come_at_the_end(tmp_path: Path) -> None:
    data = text(*life("a"), *life("a"), *life("b")[:3])
    polled, closed = read(tmp_path, data)
    assert [row["id"] for row in polled.requests] == ["a"]
    assert (polled.understood, polled.ignored) == (9, 6)
    assert [row["id"] for row in closed.requests] == ["b"]
    assert closed.requests[0]["first_token_ns"] == -1
    assert closed.requests[0]["computed_tokens"] == 513


@given(st.permutations(life("a") + life("b", 7_000_001)))
def test_any_order_gives_the_same_rows(rows: list[dict[str, Any]]) -> None:
    path = f"/tmp/kvprobe-test-events-{os.getpid()}.jsonl"
    try:
        Path(path).write_bytes(text(*rows))
        signal = EventSignal(path)
        batch = signal.poll()
        got = sorted(batch.requests, key=lambda row: str(row["id"]))
        assert got == [row_of("a"), row_of("b", 7_000_001)]
        assert (batch.understood, batch.ignored) == (12, 0)
        assert not signal.close().requests
    finally:
        Path(path).unlink()


BAD_LINES = [
    b"garbage",
    b"{",
    b"[1]",
    b"7",
    b"null",
    b'"x"',
    b"\xff\xfe\x00",
    b'{"event":"arrival","id":"\xff","t_ns":1}',
    b'\1{"event":"arrival","id":"z","t_ns":1}',
    b'{"event":"landing","id":"z","t_ns":1}',
    b'{"event":["arrival"],"id":"z","t_ns":1}',
    b'{"event":"arrival","t_ns":1}',
    b'{"event":"arrival","id":"","t_ns":1}',
    b'{"event":"arrival","id":null,"t_ns":1}',
    b'{"event":"arrival","id":"z"}',
    b'{"event":"arrival","id":"z","t_ns":"1"}',
    b'{"event":"arrival","id":"z","t_ns":1.5}',
    b'{"event":"arrival","id":"z","t_ns":true}',
    b'{"event":"arrival","id":"z","t_ns":-1}',
    b'{"event":"arrival","id":"z","t_ns":0}',
    b'{"event":"arrival","id":"z","t_ns":9223372036854775808}',
    b'{"event":"arrival","id":"z","t_ns":NaN}',
    b'{"event":"arrival","id":"z","t_ns":' + b"9" * 5000 + b"}",
    b'{"event":"arrival","id":"' + b"z" * 513 + b'","t_ns":1}',
    b'{"event":"keys","id":"z","keys":"abc"}',
    b'{"event":"keys","id":"z","keys":[1]}',
    b'{"event":"keys","keys":[]}',
    b'{"event":"engine"}',
    b'{"event":"engine","name":7}',
    b'{"event":"engine","name":"x","clock":"sundial"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_counted_and_harms_nothing(tmp_path: Path, line: bytes) -> None:
    good = text(*life("a"))
    cut = good.index(b"\n", 150) + 1
    polled, closed = read(tmp_path, good[:cut] + line + b"\n" + good[cut:])
    assert list(polled.requests) == [row_of("a")]
    assert (polled.understood, polled.ignored) == (6, 1)
    assert not closed.requests


def test_bad_counts_and_facts_are_unknown_not_zero(tmp_path: Path) -> None:
    rows = life("a")
    rows[0]["prompt_tokens"] = "many"
    rows[2] |= {"device_hit_tokens": -1, "storage_hit_tokens": 1.5, "computed_tokens": True}
    odd = ENGINE | {"unit_tokens": 0, "unit_bytes": "big", "direct": 1, "model": 7, "extra": []}
    polled, _ = read(tmp_path, text(odd, *rows))
    assert {polled.requests[0][c] for c in row_of("a") if c.endswith("_tokens")} == {-1}
    assert polled.ignored == 0
    engine = polled.engine
    assert engine is not None
    assert (engine.unit_tokens, engine.unit_bytes, engine.direct, engine.model) == (None,) * 4


ARITHMETIC: dict[str, Any] = {
    "linear_flops_per_token": 101,
    "attention_flops_per_pair": 103,
    "head_flops": 107,
    "weight_bytes": 109,
    "kv_bytes_per_token": 113,
}


@pytest.mark.parametrize(
    "more", [{}, {"devices": 2, "item_bits": 8, "tokens_per_pass": 127, "source": "a config.json"}]
)
def test_an_engine_tells_its_arithmetic(tmp_path: Path, more: dict[str, Any]) -> None:
    told = ARITHMETIC | more
    polled, _ = read(tmp_path, text(ENGINE | {"arithmetic": told | {"newer": [1]}}))
    assert polled.engine is not None
    assert polled.engine.arithmetic == ModelArithmetic(**told)
    nothing_more = dict.fromkeys(("tokens_per_pass", "devices", "source"))
    polled, _ = read(tmp_path, text(ENGINE | {"arithmetic": ARITHMETIC | nothing_more}))
    assert polled.engine is not None
    assert polled.engine.arithmetic == ModelArithmetic(**ARITHMETIC)


@pytest.mark.parametrize(
    "odd",
    [
        None,
        7,
        [],
        {},
        "llama",
        *({k: v for k, v in ARITHMETIC.items() if k != missing} for missing in ARITHMETIC),
        *(ARITHMETIC | {"weight_bytes": odd} for odd in ("109", 1.5, True, 0, -1, 1 << 60, None)),
        ARITHMETIC | {"devices": 0},
        ARITHMETIC | {"tokens_per_pass": "all"},
        ARITHMETIC | {"source": 7},
    ],
)
def test_arithmetic_that_is_none_is_unknown(tmp_path: Path, odd: Any) -> None:
    polled, _ = read(tmp_path, text(ENGINE | {"arithmetic": odd}))
    assert (polled.understood, polled.ignored) == (1, 0)
    assert polled.engine is not None and polled.engine.arithmetic is None
    assert polled.engine.unit_tokens == 16


def test_the_first_of_two_equal_events_counts(tmp_path: Path) -> None:
    twice = life("a", 9_000_001)[:3]
    polled, _ = read(tmp_path, text(*life("a")[:3], *twice, *life("a")[3:]))
    assert list(polled.requests) == [row_of("a")]
    assert (polled.understood, polled.ignored) == (6, 3)


def test_keys_become_rows_once(tmp_path: Path) -> None:
    keys = {"event": "keys", "id": 17, "keys": ["aa", "bb", "cc"]}
    polled, _ = read(tmp_path, text(keys, keys))
    assert list(polled.keys) == [
        {"request_id": "17", "position": place, "key": key}
        for place, key in enumerate(["aa", "bb", "cc"])
    ]
    assert (polled.understood, polled.ignored) == (1, 1)


def test_an_engine_that_restarts_may_use_its_ids_again(tmp_path: Path) -> None:
    data = text(ENGINE, *life("a"), *life("b")[:2], ENGINE, *life("a", 5_000_011))
    polled, closed = read(tmp_path, data)
    assert [(row["id"], row["arrival_ns"]) for row in polled.requests] == [
        ("a", 1_000_003),
        ("b", 1_000_003),
        ("a", 5_000_011),
    ]
    assert not closed.requests
    assert polled.ignored == 0


def test_a_finished_request_with_gaps_is_not_held_for_ever(tmp_path: Path) -> None:
    early = [row for row in life("gap") if row["event"] != "scheduled"]
    rest = [row for n in range(167) for row in life(f"r{n}")]
    path = tmp_path / "events.jsonl"
    path.write_bytes(text(*early, *rest))
    signal = EventSignal(str(path))
    polled = signal.poll()
    assert [row for row in polled.requests if row["id"] == "gap"] == [
        row_of("gap") | {"scheduled_ns": -1}
    ]
    assert len(polled.requests) == 168
    with path.open("ab") as file:
        file.write(text(life("gap")[1]))
    late = signal.close()
    assert (len(late.requests), late.ignored) == (0, 1), "too late"


def test_wall_clock_is_put_on_the_monotonic_clock(tmp_path: Path) -> None:
    wall, mono = time.time_ns(), time.monotonic_ns()
    polled, _ = read(tmp_path, text(ENGINE | {"clock": "wall"}, *life("a", wall)))
    assert abs(polled.requests[0]["arrival_ns"] - mono) < 5_000_000
    assert 0 <= polled.requests[0]["uncertainty_ns"] < 1_000_000
    monotonic_time_called_wall = text(ENGINE | {"clock": "wall"}, *life("a", 1_000_003))
    polled, _ = read(tmp_path, monotonic_time_called_wall)
    assert (len(polled.requests), polled.ignored) == (0, 6), "before this boot: refused"


def test_followed_byte_by_byte_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    signal = EventSignal(str(path))
    assert signal.poll() == SignalBatch([], [], None, 0, 0), "the file comes later"
    rows: list[Any] = []
    understood = 0
    with path.open("wb", buffering=0) as file:
        data = text(ENGINE, *life("a"), *life("b"))
        for at in range(0, len(data), 7):
            file.write(data[at : at + 7])
            batch = signal.poll()
            rows += batch.requests
            understood += batch.understood
            assert batch.ignored == 0
    assert rows == [row_of("a"), row_of("b")]
    assert understood == 13


def test_a_last_line_without_end_is_kept_and_used_at_the_end(tmp_path: Path) -> None:
    polled, closed = read(tmp_path, text(*life("a")).rstrip(b"\n"))
    assert (len(polled.requests), polled.understood) == (0, 5)
    assert (len(closed.requests), closed.understood, closed.ignored) == (1, 1, 0)
    polled, closed = read(tmp_path, text(*life("a"))[:-9])
    assert closed.requests[0]["first_token_ns"] == row_of("a")["first_token_ns"]
    assert closed.ignored == 1, "torn for good"


def test_rotation_and_truncation_lose_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(text(*life("a"), *life("b")[:3]))
    signal = EventSignal(str(path))
    got = list(signal.poll().requests)
    with path.open("ab") as file:
        file.write(text(*life("b")[3:]))  # not polled before the rotation
    path.rename(tmp_path / "events.jsonl.1")
    path.write_bytes(text(*life("c"), *life("d")))
    got += signal.poll().requests
    assert [row["id"] for row in got] == ["a", "b", "c", "d"]
    path.write_bytes(text(*life("e")))  # truncated in place, shorter than before
    got += signal.poll().requests
    path.unlink()
    assert not signal.poll().requests
    path.write_bytes(text(*life("f")))
    got += signal.poll().requests
    assert [row["id"] for row in got] == ["a", "b", "c", "d", "e", "f"]
    assert got == [row_of(name) for name in "abcdef"]


@pytest.mark.parametrize("size", [MAX_LINE_BYTES + 1, 10 << 20])
def test_a_huge_line_is_skipped_without_being_held(tmp_path: Path, size: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(text(*life("a")) + b"x" * size + b"\n" + text(*life("b")))
    signal = EventSignal(str(path))
    batches = [signal.poll() for _ in range(4)]
    assert [row["id"] for batch in batches for row in batch.requests] == ["a", "b"]
    assert sum(batch.ignored for batch in batches) == 1
    assert sum(batch.understood for batch in batches) == 12


def test_the_longest_line_that_is_allowed(tmp_path: Path) -> None:
    line = json.dumps({"event": "keys", "id": "k", "keys": ["f" * 64] * 61_679})
    line += " " * (MAX_LINE_BYTES - len(line))
    polled, _ = read(tmp_path, line.encode() + b"\n")
    assert (len(polled.keys), polled.ignored) == (61_679, 0)


def test_a_poll_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    path.write_bytes((b'{"event":"none"}' + b" " * 83 + b"\n") * 100_003)
    signal = EventSignal(str(path))
    first = signal.poll().ignored
    assert 0 < first < 100_003
    assert first + signal.close().ignored == 100_003


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_lines_are_those_of_split_however_they_arrive(data: bytes, sizes: list[int]) -> None:
    path = Path(f"/tmp/kvprobe-test-lines-{os.getpid()}")
    try:
        follower, got, at = LineFollower(str(path)), [], 0
        with path.open("wb", buffering=0) as file:
            for size in sizes:
                file.write(data[at : at + size])
                at += size
                got += follower.lines()
        written = data[:at].replace(b"\0", b"")
        got += follower.close()
        expected = written.split(b"\n")
        assert got == (expected if expected[-1] else expected[:-1])
    finally:
        path.unlink()


def test_settings_are_those_of_the_engine_named() -> None:
    translate = engines()["jsonl"].translate
    workload = EngineFacts(
        "kvprobe-workload", unit_tokens=16, unit_bytes=16 * 2048, bytes_per_token=2048
    )
    unit = translate("unit_bytes", 131 * 2048, workload)
    assert (unit.name, unit.value) == ("--unit-tokens", "131")
    depth = translate("bytes_in_flight", 7 * 16 * 2048 + 5, workload)
    assert (depth.name, depth.value) == ("--reads-in-flight", "7")
    on, off = (translate("prefetch_horizon", value, workload) for value in (1, 0))
    assert on.name == off.name == "--prefetch" and on.value is None and off.value is None
    assert off.how.startswith("leave out")
    assert translate("unit_bytes", 1, EngineFacts("kvprobe-workload")).name is None
    vllm = EngineFacts("vllm", bytes_per_token=2048)
    assert translate("unit_bytes", 64 * 2048, vllm).name == "block_size"
    assert translate("unit_bytes", 64 * 2048, EngineFacts("jsonl")).name is None
    assert "other" in translate("unit_bytes", 1, EngineFacts("other")).how
