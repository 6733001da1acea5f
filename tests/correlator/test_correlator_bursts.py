"""Where one prompt's lookups end and the next one's begin, and whose they are."""

import errno
from typing import Any

import pytest

from kvprobe.correlator.bursts import bursts
from kvprobe.correlator.identify import identify
from kvprobe.correlator.promises import asked
from kvprobe.correlator.waiting import Waiting
from kvprobe.schema import LookupKind
from tests.correlator.rows import frame, lookup, opened
from tests.correlator.simulate import Node

Rows = list[dict[str, Any]]
STEP_NS = 9_000


def asks(words: str, at: int = 1_000_000, **more: Any) -> Rows:
    """Existence tests one after another; a name that ends in ``-`` is a miss."""
    rows = []
    for i, word in enumerate(words.split()):
        result = -errno.ENOENT if word.endswith("-") else 0
        path = f"/kv/{word.rstrip('-')}.bin"
        start = at + i * STEP_NS
        rows.append(lookup(LookupKind.ACCESS, path, start, **({"result": result} | more)))
    return rows


def cut(lookups: Rows, requests: int = 100) -> list[str]:
    """Bursts, each as its hits, a bar and its misses."""
    frames = frame("lookups", lookups)
    files = identify(frames, frame("ops", []))
    # They wait all the time, so that pauses alone are no end of a prompt.
    waiting = [request(str(i), 0, 10**12, 2) for i in range(requests)]
    found = bursts(frames, files, Waiting(frame("requests", waiting), None))
    for burst in found:
        assert [int(files.lookup_key[row]) for row in burst.rows] == burst.hits + burst.misses
    return [
        " ".join(
            [files.keys[k] for k in burst.hits] + ["|"] + [files.keys[k] for k in burst.misses]
        )
        for burst in found
    ]


def test_a_miss_ends_a_prompt() -> None:
    assert cut(asks("a0 a1 a2- b0 b1- c0- d0- a0 a1-")) == [
        "a0 a1 | a2",
        "b0 | b1",
        "| c0",
        "| d0",
        "a0 | a1",
    ]


def test_an_engine_that_tests_all_chunks() -> None:
    assert cut(asks("a0 a1 a2- a3- a4- b0 b1- b2- b3-"), requests=2) == [
        "a0 a1 | a2 a3 a4",
        "b0 | b1 b2 b3",
    ]


def test_a_pause_ends_a_prompt() -> None:
    assert cut(asks("a0 a1") + asks("b0 b1", at=9_000_000)) == ["a0 a1 |", "b0 b1 |"]


def test_a_pause_while_a_request_waits_may_lie_within_its_prompt() -> None:
    rows = asks("a0 a1") + asks("a2 a3 b0 b1", at=9_000_000)
    waits = [request("x", 900_000, 20_000_000, 4), request("y", 5_000_000, 20_000_000, 2)]
    assert whose(rows, waits) == ["x: a0 a1 a2 a3", "y: b0 b1"]
    # The first is gone when the thread goes on.
    waits[0]["prefill_start_ns"] = 2_000_000
    waits[0]["storage_hit_tokens"] = 16 * 2
    waits[1]["storage_hit_tokens"] = 16 * 4
    assert whose(rows, waits) == ["x: a0 a1", "y: a2 a3 b0 b1"]


def test_threads_have_their_own_bursts() -> None:
    rows = asks("a0 a1 a2", tid=1) + asks("b0 b1 b2", at=1_004_000, tid=2)
    assert cut(rows) == ["a0 a1 a2 |", "b0 b1 b2 |"]


def test_chunks_of_one_prompt_are_distinct() -> None:
    assert cut(asks("a0 a1 a2 a0 a1 a1 a2")) == ["a0 a1 a2 |", "a0 a1 |", "a1 a2 |"]


def test_a_key_that_began_other_prompts_begins_one() -> None:
    rows = asks("b0 b1-") + asks("a0 a1 a2 b0 b1 b2 b3", at=9_000_000)
    assert cut(rows) == ["b0 | b1", "a0 a1 a2 |", "b0 b1 b2 b3 |"]


def test_a_key_that_usually_follows_another_does_not_begin_a_prompt() -> None:
    # Device memory held a0 and a1 once, so that only the rest was tested.
    rows = asks("a2 a3 a4")
    for number in range(1, 5):
        rows += asks("a0 a1 a2 a3 a4", at=9_000_000 * number)
    assert cut(rows) == ["a2 a3 a4 |", *["a0 a1 a2 a3 a4 |"] * 4]


def test_an_engine_that_asks_twice_for_each_chunk() -> None:
    assert cut(asks("a0 a0 a1 a1 a2 a2 b0- b0- c0 c0 c1- c1-")) == [
        "a0 a1 a2 | b0",
        "c0 | c1",
    ]


def test_a_writer_tests_before_it_stores() -> None:
    rows = asks("a0 a1-")
    for number, key in enumerate(("a1", "a2")):
        at = 1_050_000 + 100_000 * number
        rows += asks(f"{key}-", at=at, tid=12)
        rows.append(opened(f"/kv/{key}.bin.tmp", at + 5000, 70 + number, tid=12, open_flags=0o101))
    assert cut(rows) == ["a0 | a1"]


def test_opens_stats_and_temporary_names() -> None:
    rows = asks("a0 a1")
    rows.append(lookup(LookupKind.STAT, "/kv/a2.bin", 1_018_000))
    rows.append(opened("/kv/b0.bin", 1_024_000, 71))
    rows.append(lookup(LookupKind.STAT, "/kv/a3.bin.tmp", 1_030_000))
    rows.append(lookup(LookupKind.STAT, "/etc/hosts", 1_035_000))
    assert cut(rows) == ["a0 a1 a2 |"]


def test_no_lookups() -> None:
    assert cut([]) == []


def request(name: str, arrival: int, prefill: int, hits: int, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "arrival_ns": arrival,
        "prefill_start_ns": prefill,
        "prefill_end_ns": prefill + 1000,
        "first_token_ns": prefill + 1010,
        "prompt_tokens": 16 * 97,
        "device_hit_tokens": 0,
        "storage_hit_tokens": 16 * hits,
        "computed_tokens": 5,
    } | more


def whose(lookups: Rows, requests: Rows, unit_tokens: int | None = 16) -> list[str]:
    """Each burst with the request it was given to."""
    frames = frame("lookups", lookups)
    files = identify(frames, frame("ops", []))
    found = asked(frames, files, frame("requests", requests), unit_tokens)
    ids = [r["id"] for r in requests]
    keys = [" ".join(files.keys[k] for k in p.hits + p.misses) for p in found]
    return [
        f"{ids[p.request] if p.request >= 0 else '-'}: {k}"
        for p, k in zip(found, keys, strict=True)
    ]


def test_hits_that_the_engine_tells_choose_the_request() -> None:
    rows = asks("a0 a1 a2-") + asks("b0 b1 b2 b3-", at=1_100_000)
    requests = [request("x", 900_000, 9_000_000, 3), request("y", 900_001, 9_000_000, 2)]
    assert whose(rows, requests) == ["y: a0 a1 a2", "x: b0 b1 b2 b3"]


def test_device_hits_may_be_tested_or_not() -> None:
    rows = asks("a0 a1 a2 a3-") + asks("b0 b1 b2 b3-", at=1_100_000)
    requests = [
        request("x", 900_000, 9_000_000, 1, device_hit_tokens=16),
        request("y", 900_001, 9_000_000, 2, device_hit_tokens=16),
        request("z", 900_002, 9_000_000, 3, device_hit_tokens=160),
    ]
    assert whose(rows, requests) == ["y: a0 a1 a2 a3", "z: b0 b1 b2 b3"]


def test_an_engine_may_test_what_device_memory_holds() -> None:
    requests = [
        request("x", 900_000, 9_000_000, 2),
        request("y", 900_001, 9_000_000, 1, device_hit_tokens=32),
    ]
    assert whose(asks("a0 a1 a2 a3-"), requests) == ["y: a0 a1 a2 a3"]


def test_without_token_counts_the_order_of_arrival_decides() -> None:
    rows = asks("a0 a1 a2-") + asks("b0 b1 b2 b3-", at=1_100_000)
    requests = [request("x", 900_000, 9_000_000, 3), request("y", 900_001, 9_000_000, 2)]
    assert whose(rows, requests, None) == ["x: a0 a1 a2", "y: b0 b1 b2 b3"]


def test_lookups_before_arrival_or_after_prefill_belong_to_nobody() -> None:
    rows = asks("a0 a1-") + asks("b0 b1-", at=50_000_000)
    requests = [request("x", 1_000_001, 9_000_000, 1), request("y", 2_000_000, 49_000_000, 1)]
    assert whose(rows, requests) == ["-: a0 a1", "-: b0 b1"]


def test_whole_prompts_one_after_another_are_told_apart_by_the_engine() -> None:
    rows = asks("a0 a1 a2 b0 b1 c0 c1 c2 c3")
    requests = [
        request("early", 100_000, 9_000_000, 11),
        request("x", 900_000, 9_000_000, 3),
        request("none", 900_001, 9_000_000, 0),
        request("y", 1_020_000, 9_000_000, 2),
        request("z", 1_030_000, 9_000_000, 4),
    ]
    assert whose(rows, requests) == ["x: a0 a1 a2", "y: b0 b1", "z: c0 c1 c2 c3"]
    # One that arrives after its own lookups cannot have made them.
    requests[3]["arrival_ns"] = 1_030_000
    assert len(whose(rows, requests)) == 1


def test_whole_prompts_are_asked_for_in_turn() -> None:
    # 7 + 2 hits would fit as well, but then y would have been asked for before x.
    rows = asks("a0 a1 a2 b0 b1 c0 c1 c2 c3")
    requests = [
        request("old", 100_000, 9_000_000, 7),
        request("x", 900_000, 9_000_000, 3),
        request("y", 900_010, 9_000_000, 2),
        request("z", 900_020, 9_000_000, 4),
    ]
    assert whose(rows, requests) == ["x: a0 a1 a2", "y: b0 b1", "z: c0 c1 c2 c3"]


def test_an_engine_that_asks_again_each_step() -> None:
    steps = [("a0 a1 ax-", "x"), ("b0 b1 bx-", "y"), ("c0 c1 cx-", "z")]
    rows: Rows = []
    requests = []
    want = []
    for number in range(7):
        at = 1_000_000 + 5_000_000 * number
        for place, (words, name) in enumerate(steps):
            begins = 2 * place
            if begins <= number < begins + 3:
                rows += asks(words, at=at)
                want.append(f"{name}: {words.rstrip('-')}")
                at += 40_000
                if number == begins:
                    requests.append(request(name, at - 90_000, at + 11_000_000, 2))
    assert whose(rows, requests) == want


def test_equal_prompts_at_once_are_two_requests() -> None:
    rows = asks("a0 a1 a2-") + asks("a0 a1 a2-", at=1_100_000)
    requests = [request("x", 900_000, 9_000_000, 2), request("y", 910_000, 9_000_000, 2)]
    assert whose(rows, requests) == ["x: a0 a1 a2", "y: a0 a1 a2"]


def test_an_unmatched_burst_joins_only_its_own_prompt() -> None:
    rows = asks("a0 a1 x-") + asks("a0 a1 y-", at=1_100_000)
    assert whose(rows, [request("x", 900_000, 9_000_000, 2)]) == ["x: a0 a1 x", "-: a0 a1 y"]


def test_a_request_without_arrival_gets_nothing_and_harms_nobody() -> None:
    rows = asks("a0 a1 a2-") + asks("b0 b1 b2-", at=1_100_000)
    requests = [
        request("lost", -1, 9_000_000, 2),
        request("x", 900_000, 9_000_000, 2),
        request("y", 910_000, 9_000_000, 2),
    ]
    assert whose(rows, requests) == ["x: a0 a1 a2", "y: b0 b1 b2"]


@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"cold_share": 0.3},
        {"full_hit_share": 0.5},
        {"full_hit_share": 1.0, "own_stored": 20},
        {"full_hit_share": 1.0, "own_stored": 20, "prefixes": 0},
        {"compute_below": 10},
        {"stall_share": 0.1},
        {"stall_share": 0.1, "full_hit_share": 0.5, "own_stored": 20},
    ],
    ids=str,
)
def test_lookups_of_a_simulated_node(concurrency: int, shape: dict[str, Any]) -> None:
    for seed in (3, 5):
        node = Node(seed, concurrency, requests=131, **shape).run()
        tables = node.capture()
        lookups, requests = tables.frame("lookups"), tables.frame("requests")
        files = identify(lookups, tables.frame("ops"))
        got = [""] * len(node.lookup_truth)
        for promise in asked(lookups, files, requests, 16):
            for row in promise.rows:
                got[row] = str(requests["id"][promise.request]) if promise.request >= 0 else ""
        tests = [row for row, want in enumerate(node.lookup_truth) if want]
        right = sum(got[row] == node.lookup_truth[row] for row in tests)
        assert right / len(tests) > {1: 0.999, 4: 0.99, 16: 0.97}[concurrency]
        assert not any(got[row] for row, want in enumerate(node.lookup_truth) if not want)
