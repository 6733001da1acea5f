"""Commands against the requests they served: by brute force, at the edges, and in a second."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.correlator import commands
from kvprobe.model import Frame
from tests.correlator.rows import DISK, block, frame

Rows = list[dict[str, Any]]


def nvme(setup: int, done: int, request: int | None = 1, **more: Any) -> dict[str, Any]:
    return {
        "setup_ns": setup,
        "done_ns": done,
        "request": request,
        "bytes": 4096,
        "device": DISK,
        "nsid": 1,
        "controller": 0,
        "queue": 1,
        "command_id": 7,
        "status": 0,
        "opcode": 2,
        "retries": 0,
        "transport": 2,
    } | more


def joined(rows: Rows, blocks: Rows) -> list[int]:
    return [int(i) for i in commands.join(frame("nvme", rows), frame("block", blocks))]


def same(device: Any, _: Any) -> Any:
    return device


def all_of(rows: Rows, blocks: Rows) -> Frame:
    made, blocked = frame("nvme", rows), frame("block", blocks)
    return commands.commands(made, blocked, commands.join(made, blocked), same)


# ---------------------------------------------------------------- join


def lives(seed: int, n: int, requests: int) -> tuple[Rows, Rows, list[int]]:
    """Requests that are used again a few nanoseconds after they end; some rows of each are lost."""
    rng = np.random.default_rng(seed)
    free = [0] * requests
    rows, blocks, truth = [], [], []
    for _ in range(n):
        request = int(rng.integers(requests))
        queued = free[request] + int(rng.integers(1, 5))
        setup = queued + int(rng.integers(0, 9))
        done = setup + int(rng.integers(1, 300))
        free[request] = end = done + int(rng.integers(0, 9))
        kept = rng.random() < 0.9
        if kept:
            blocks.append(block(queued, end, request=request))
        if rng.random() < 0.9:
            tries = [setup, *([setup + (done - setup) // 2] if rng.random() < 0.1 else [])]
            for at in tries:
                rows.append(nvme(at, done, request))
                truth.append(len(blocks) - 1 if kept else -1)
    return rows, blocks, truth


@pytest.mark.parametrize("seed", [3, 5, 7])
def test_each_command_finds_the_life_it_was_set_up_in(seed: int) -> None:
    rows, blocks, truth = lives(seed, 1009, 13)
    assert joined(rows, blocks) == truth
    assert truth.count(-1) > 29


def brute_force(rows: Rows, blocks: Rows) -> list[int]:
    found = []
    for row in rows:
        inside = [
            i
            for i, b in enumerate(blocks)
            if b["request"] == row["request"]
            and row["request"] is not None
            and (b["queued_ns"] is None or b["queued_ns"] <= row["setup_ns"])
            and row["setup_ns"] <= b["done_ns"]
        ]
        found.append(min(inside, key=lambda i: blocks[i]["done_ns"]) if inside else -1)
    return found


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 4))
def test_brute_force_agrees(seed: int, n: int, requests: int) -> None:
    rows, blocks, _ = lives(seed, n, requests)
    assert joined(rows, blocks) == brute_force(rows, blocks)


def test_the_edges_of_a_life_belong_to_it() -> None:
    blocks = [block(100, 200, request=1), block(300, 400, request=1)]
    at = [99, 100, 200, 201, 300, 400, 401]
    assert joined([nvme(t, 900) for t in at], blocks) == [-1, 0, 0, -1, 1, 1, -1]


def test_unknown_requests_join_nothing_and_an_unknown_begin_is_no_bound() -> None:
    assert joined([nvme(150, 180, None)], [block(100, 200, request=None)]) == [-1]
    assert joined([nvme(150, 180)], [block(100, 200) | {"queued_ns": None, "request": 1}]) == [0]
    assert joined([], [block(1, 2)]) == []
    assert joined([nvme(1, 2)], []) == [-1]


def test_a_million_rows_in_about_a_second() -> None:
    n = 1_000_000
    rng = np.random.default_rng(7)
    queued = np.sort(rng.integers(0, 2**36, n))
    ids = (np.arange(n) % 4096) << 8 | 1 << 40
    blocks = {"request": ids, "queued_ns": queued, "done_ns": queued + 90_000}
    rows = {"request": ids, "setup_ns": queued + 1000}
    # A life ends before its request is used again, 4096 rows later.
    assert (queued[4096:] > queued[:-4096] + 90_000).all()
    begin = time.process_time()
    found = commands.join(rows, blocks)
    assert time.process_time() - begin < 3
    assert (found == np.arange(n)).all()


# ---------------------------------------------------------------- commands


def test_a_retried_request_ends_with_its_last_command() -> None:
    rows = [nvme(110, 140), nvme(150, 180, retries=1, sent_ns=151)]
    found = all_of(rows, [block(100, 200, request=1)])
    assert found["end_ns"].tolist() == [-1, 200]
    assert found["sent_ns"].tolist() == [-1, 151]
    assert found["retries"].tolist() == [0, 1]
    assert found["block"].tolist() == [0, 0]


def test_what_is_no_command_of_a_device_is_left_out() -> None:
    rows = [
        nvme(110, 140, opcode=1, bytes=8192),
        nvme(111, 141, queue=0),
        nvme(112, 142, 2, device=None),
        nvme(113, 143, 3, opcode=0, bytes=0),
    ]
    found = all_of(rows, [block(100, 200, request=1)])
    assert found["op"].tolist() == [commands.WRITE, commands.OTHER]
    assert found["bytes"].tolist() == [8192, 0]


def test_a_command_of_no_device_has_that_of_its_request() -> None:
    found = all_of([nvme(110, 140, device=None)], [block(100, 200, request=1)])
    assert found["device"].tolist() == [DISK]


def test_devices_without_commands_give_their_requests() -> None:
    other = DISK + 1
    blocks = [
        block(100, 200, request=1),
        block(100, 220, device=other, hw_queue=3, bytes=512, op=1) | {"issued_ns": 150},
        block(100, 230, device=other, op=3) | {"issued_ns": None},
    ]
    found = all_of([nvme(110, 140)], blocks)
    assert found["device"].tolist() == [DISK, other, other]
    assert found["start_ns"].tolist() == [110, 150, 100]
    assert found["queue"].tolist() == [1, 3, -1]
    assert found["controller"].tolist() == [0, -1, -1]
    assert found["op"].tolist() == [0, 1, commands.OTHER]
    assert found["block"].tolist() == [0, 1, 2]
