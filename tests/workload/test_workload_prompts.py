"""Prompts: traces read, rescaled to any unit, made up with a stated sharing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import KvprobeError
from kvprobe.workload.prompts import Prompt, Synthetic, chunk_key, read_mooncake
from kvprobe.workload.reuse import ideal_reuse

TRACE = Path(__file__).parents[1] / "data" / "mooncake_head.jsonl"
BLOCK = 512


def chained(tokens: list[int], ids: dict[tuple[int, ...], int]) -> Prompt:
    """A prompt with real tokens: block ids stand for everything up to the block's end."""
    blocks = [
        ids.setdefault(tuple(tokens[: at + BLOCK]), len(ids)) for at in range(0, len(tokens), BLOCK)
    ]
    return Prompt(0, len(tokens), tuple(blocks), BLOCK)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), min_size=2, max_size=6),
    st.sampled_from([1, 16, 48, 100, 128, 256, 512, 768, 1024, 1536]),
)
def test_rescaling_keeps_prefixes(texts: int, cuts: list[tuple[int, int]], unit: int) -> None:
    """Chunks are equal exactly where the tokens behind them are, at block boundaries."""
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for number, (shared_blocks, length) in enumerate(cuts):
        shared = [number % texts] * (shared_blocks * BLOCK)
        tokens = (shared + [1000 + number] * length)[: max(length, 1)]
        prompts.append((tokens, chained(tokens, ids)))
    for left_tokens, left in prompts:
        chunks = left.chunks(unit)
        assert len(chunks) == len(left_tokens) // unit
        assert len(set(chunks)) == len(chunks), "a chunk appears once in a prompt"
        for right_tokens, right in prompts:
            for place, (a, b) in enumerate(zip(chunks, right.chunks(unit), strict=False)):
                end = (place + 1) * unit
                whole_blocks = -(-end // BLOCK) * BLOCK
                assert (a == b) == (left_tokens[:whole_blocks] == right_tokens[:whole_blocks])
                assert a != b or left_tokens[:end] == right_tokens[:end]


def test_chunks_of_a_trace_by_hand() -> None:
    prompt = Prompt(0, 1300, (7, 8, 9), BLOCK)
    assert prompt.chunks(512) == [(7, 512), (8, 512)]
    assert prompt.chunks(1024) == [(8, 512)]
    assert prompt.chunks(256) == [(7, 256), (7, 512), (8, 256), (8, 512), (9, 256)]
    assert prompt.chunks(400) == [(7, 400), (8, 288), (9, 176)]
    assert prompt.chunks(1301) == []
    cut = prompt.cut(1024)
    assert (cut.tokens, cut.blocks) == (1024, (7, 8))
    assert prompt.cut(1025).blocks == (7, 8, 9)
    assert prompt.cut(None) is prompt and prompt.cut(1300) is prompt


def test_keys_differ_by_chunk_and_by_unit() -> None:
    keys = {chunk_key((block, reach), unit) for block in range(7) for reach in (16, 32)
            for unit in (16, 32)}  # fmt: skip
    assert len(keys) == 28
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


def test_a_real_trace_is_read_as_its_rows_say() -> None:
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    prompts = list(read_mooncake(str(TRACE)))
    assert [p.tokens for p in prompts] == [row["input_length"] for row in rows]
    assert [p.arrival_ns for p in prompts] == [row["timestamp"] * 10**6 for row in rows]
    assert [list(p.blocks) for p in prompts] == [row["hash_ids"] for row in rows]
    assert len(list(read_mooncake(str(TRACE), 13))) == 13


def test_ideal_reuse_is_that_of_the_block_ids() -> None:
    """At the trace's own unit the answer can be had from the ids alone."""
    seen: set[int] = set()
    reusable = 0
    for line in TRACE.read_text().splitlines():
        row = json.loads(line)
        for block in row["hash_ids"][: (row["input_length"] - 1) // BLOCK]:
            if block not in seen:
                break
            reusable += BLOCK
        seen.update(row["hash_ids"][: row["input_length"] // BLOCK])
    fine, own, coarse = ideal_reuse(str(TRACE), [16, 512, 2048])
    assert own["reusable_tokens"] == reusable > 0
    assert own["distinct_chunks"] == len(seen)
    assert fine["reusable_tokens"] >= own["reusable_tokens"] >= coarse["reusable_tokens"]


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", "7", '{"timestamp":0,"input_length":5}', "\0",
     '{"timestamp":"a","input_length":5,"hash_ids":[1]}',
     '{"timestamp":0,"input_length":513,"hash_ids":[1]}',
     '{"timestamp":0,"input_length":512,"hash_ids":[1,2]}',
     '{"timestamp":0,"input_length":512,"hash_ids":5}'],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp":0,"input_length":9,"hash_ids":[1]}\n' + line + "\n")
    with pytest.raises(KvprobeError, match="line 2"):
        list(read_mooncake(str(path)))


def test_a_missing_trace_is_one_line() -> None:
    with pytest.raises(KvprobeError, match="No such file"):
        list(read_mooncake("/nonexistent"))


def test_synthetic_sharing_is_as_stated() -> None:
    made = Synthetic(2003, prompt_tokens=1000, sigma=0.3, prefixes=7, zipf=1.0, shared_share=0.6)
    prompts = made.prompts()
    lengths = np.array([p.tokens for p in prompts])
    assert len(prompts) == 2003
    assert 960 < np.median(lengths) < 1040
    assert 0.28 < np.std(np.log(lengths)) < 0.32
    families: Counter[int] = Counter()
    first: dict[int, int] = {}
    for prompt in prompts:
        shared = [block for block in prompt.blocks if block % 2 == 0]
        assert len(shared) == int(prompt.tokens * 0.6) // 16
        assert list(prompt.blocks[: len(shared)]) == shared, "the shared part comes first"
        families[first.setdefault(prompt.blocks[0], len(first))] += 1
    counts = sorted(families.values(), reverse=True)
    weights = 1 / np.arange(1, 8)
    assert len(counts) == 7
    expected = 2003 * weights / weights.sum()
    assert sum((counts - expected) ** 2 / expected) < 22.5, "chi square, 6 degrees, p = 0.001"
    private = Counter(b for p in prompts for b in p.blocks if b % 2)
    assert set(private.values()) == {1}


def test_synthetic_is_repeatable() -> None:
    assert Synthetic(17, seed=3).prompts() == Synthetic(17, seed=3).prompts()
    assert Synthetic(17, seed=3).prompts() != Synthetic(17, seed=4).prompts()


@pytest.mark.parametrize(
    "changes", [{"requests": 0}, {"prefixes": 0}, {"shared_share": 1.1}, {"sigma": -1.0},
                {"zipf": -0.1}, {"prompt_tokens": 0}],
)  # fmt: skip
def test_synthetic_without_a_meaning_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(KvprobeError):
        Synthetic(**{"requests": 5, **changes})  # type: ignore[arg-type]
