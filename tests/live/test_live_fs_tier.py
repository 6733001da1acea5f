"""vLLM with its fs tier: look-ups, reads and who caused them, at four requests at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvprobe.correlator import Ledger
from kvprobe.schema import LookupKind, OpKind
from tests.live.engine_client import Ask, tokens
from tests.live.engine_node import PROMPTS, FsTierNode, Look, number_of
from tests.live.engine_vllm import BLOCK_BYTES, BLOCK_TOKENS

ROUNDS, CONCURRENCY = 3, 4
NEW, NEW_TOKENS = 5, 1009
NEW_NUMBER = 900


@pytest.fixture(scope="module")
def look(fs_tier: FsTierNode) -> Look:
    """Every prompt three times from the files; then some that nobody has stored."""
    with fs_tier.look() as look:
        for _ in range(ROUNDS):
            look.answers += fs_tier.client.ask_all(fs_tier.asks(range(PROMPTS)), CONCURRENCY)
        new = [Ask(f"n{n}-{n}", tokens(NEW_TOKENS, n)) for n in range(NEW_NUMBER, NEW_NUMBER + NEW)]
        look.answers += fs_tier.client.ask_all(new)
    return look


@pytest.fixture(scope="module")
def ledger(look: Look) -> Ledger:
    return look.seen.ledger


def counted(look: Look, name: str) -> int:
    return look.counted("vllm", f"vllm:kv_offload_tiering_{name}_total", tier="1:fs")


def test_hit_map_is_the_engines(look: Look) -> None:
    """One ``access`` a chunk; its answer is the hit or the miss."""
    lookups = look.seen.lookups
    tests = (lookups["kind"] == LookupKind.ACCESS) & (lookups["kv_temporary"] == 0)
    hits = int((tests & (lookups["result"] == 0)).sum())
    assert hits == counted(look, "chunk_hits") > 0
    # A look-up asks for all chunks of a prompt at once; before a store the tier asks once more.
    misses = int((tests & (lookups["result"] < 0)).sum())
    stored = counted(look, "write_bytes") // BLOCK_BYTES
    assert stored == NEW * (NEW_TOKENS // BLOCK_TOKENS)
    assert misses == 2 * stored


def test_read_bytes_are_the_engines(look: Look, ledger: Ledger) -> None:
    reads = ledger.ops["kind"] < OpKind.WRITE
    assert int(ledger.ops["result"][reads].sum()) == counted(look, "read_bytes") > 0
    assert sum(ledger.attributed_bytes.values()) == counted(look, "read_bytes")


def test_bytes_are_tied_to_the_right_request(fs_tier: FsTierNode, ledger: Ledger) -> None:
    """What the client knows: prompts have no file in common."""
    ops = ledger.ops
    right = 0
    reads = np.flatnonzero(ops["kind"] < OpKind.WRITE)
    for op in reads.tolist():
        request = int(ops["request"][op])
        if request >= 0:
            files = fs_tier.files.get(number_of(ledger.accounts[request].id), frozenset())
            right += int(ops["result"][op]) * (ops["key"][op] in files)
    assert right >= 0.95 * ops["result"][reads].sum()


def test_hit_tokens_are_those_of_the_answers(look: Look, ledger: Ledger) -> None:
    found = {a.id: (a.storage_hit_tokens or 0) + (a.host_hit_tokens or 0) for a in ledger.accounts}
    for answer in look.answers:
        assert found[answer.id] == answer.cached_tokens
    assert sum(found.values()) == look.counted("vllm", "vllm:external_prefix_cache_hits_total")


def test_time_to_first_token_is_the_engines(fs_tier: FsTierNode, ledger: Ledger) -> None:
    engine = fs_tier.tee.latencies()
    assert len(ledger.accounts) == ROUNDS * PROMPTS + NEW
    for account in ledger.accounts:
        told_ns = engine[account.id]["time_to_first_token"] * 1e9
        assert account.ttft_ns is not None
        assert account.ttft_ns == pytest.approx(told_ns, rel=0.01, abs=2e6)


def test_engine_is_known_from_its_files(ledger: Ledger) -> None:
    """Nobody told kvprobe what a file holds."""
    assert ledger.engine is not None
    assert ledger.engine.unit_tokens == BLOCK_TOKENS
    assert ledger.engine.unit_bytes == BLOCK_BYTES
