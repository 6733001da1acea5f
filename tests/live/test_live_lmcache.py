"""vLLM with LMCache's server, both as they come: the lookup-hash log makes the join exact."""

from __future__ import annotations

import pytest

from kvprobe.correlator import Ledger
from tests.live.engine_node import PROMPTS, LMCacheNode, Look, number_of

ROUNDS, CONCURRENCY = 3, 4


@pytest.fixture(scope="module")
def look(lmcache: LMCacheNode) -> Look:
    """Every prompt three times from the files, four at a time."""
    with lmcache.look() as look:
        for _ in range(ROUNDS):
            lmcache.forget_memory()
            look.answers += lmcache.client.ask_all(lmcache.asks(range(PROMPTS)), CONCURRENCY)
    return look


@pytest.fixture(scope="module")
def ledger(look: Look) -> Ledger:
    return look.seen.ledger


def test_all_requests_are_there_once(look: Look, ledger: Ledger) -> None:
    assert sorted(a.id for a in ledger.accounts) == sorted(answer.id for answer in look.answers)
    assert len(look.answers) == ROUNDS * PROMPTS


def test_restored_bytes_are_tied_exactly(ledger: Ledger) -> None:
    total = sum(ledger.attributed_bytes.values())
    assert total > 0
    assert ledger.attributed_bytes["exact"] >= 0.99 * total


def test_and_to_the_right_request(lmcache: LMCacheNode, ledger: Ledger) -> None:
    """What the client knows: prompts have no file in common."""
    ops = ledger.ops
    owners = [ledger.accounts[request].id for request in ops["request"].tolist()]
    right = [
        key in lmcache.files[number_of(owner)]
        for key, owner in zip(ops["key"].tolist(), owners, strict=True)
    ]
    assert right.count(True) >= 0.99 * len(right)


def test_hit_tokens_are_those_of_the_engines(look: Look, ledger: Ledger) -> None:
    storage = sum(a.storage_hit_tokens or 0 for a in ledger.accounts)
    host = sum(a.host_hit_tokens or 0 for a in ledger.accounts)
    assert storage == look.counted("lmcache", "lmcache_mp_lookup_hit_l2_tokens_total") > 0
    assert host == look.counted("lmcache", "lmcache_mp_lookup_hit_l1_tokens_total")
    assert storage + host == look.counted("vllm", "vllm:external_prefix_cache_hits_total")


def test_hit_tokens_are_those_of_the_answers(look: Look, ledger: Ledger) -> None:
    cached = {answer.id: answer.cached_tokens for answer in look.answers}
    assert {a.id: a.storage_hit_tokens for a in ledger.accounts} == cached


def test_time_to_first_token_is_the_engines(lmcache: LMCacheNode, ledger: Ledger) -> None:
    engine = lmcache.tee.latencies()
    for account in ledger.accounts:
        told_ns = engine[account.id]["time_to_first_token"] * 1e9
        assert account.ttft_ns is not None
        assert account.ttft_ns == pytest.approx(told_ns, rel=0.01, abs=2e6)


def test_nothing_was_lost(look: Look) -> None:
    assert not any(loss.lost for loss in look.seen.manifest.losses.values())
