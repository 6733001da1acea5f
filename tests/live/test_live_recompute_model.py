"""The recompute model, fitted on a real engine, against prefills that it has not seen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest

from kvprobe.correlator.cost_model import prefill_terms
from kvprobe.correlator.ledger import Account
from kvprobe.correlator.routes import Routes
from kvprobe.model import Interval
from tests.live.engine_client import Ask, tokens
from tests.live.engine_node import FsTierNode

REQUESTS, FOLDS = 211, 10
LENGTHS = range(300, 3500)
FIRST_SEED = 10_000


@pytest.fixture(scope="module")
def predictions(fs_tier: FsTierNode) -> list[tuple[float, Interval]]:
    """The engine's own prefill time of each request, and what the others predict for it."""
    source = random.Random(11)
    asks = [
        Ask(f"m{n}-{n}", tokens(source.choice(LENGTHS), FIRST_SEED + n), recompute=True)
        for n in range(REQUESTS)
    ]
    with fs_tier.look() as look:
        look.answers += fs_tier.client.ask_all(asks)
    accounts = [a for a in look.seen.ledger.accounts if a.spans and a.spans.prefill_ns]
    # Of the others the start of the prefill is not known well enough.
    assert len(accounts) > 0.7 * REQUESTS
    source.shuffle(accounts)
    return [
        (fs_tier.tee.latencies()[account.id]["time_in_model_prefill"] * 1e9, predicted)
        for account, predicted in _held_out(accounts)
    ]


def _held_out(accounts: list[Account]) -> Iterator[tuple[Account, Interval]]:
    for fold in range(FOLDS):
        model = Routes.fit([a for n, a in enumerate(accounts) if n % FOLDS != fold]).recompute
        assert model is not None
        for account in accounts[fold::FOLDS]:
            computed, prompt = account.computed_tokens, account.prompt_tokens
            assert computed is not None
            assert computed == prompt, "nothing was loaded"
            yield account, model.interval_ns(model.seconds(prefill_terms(computed, 0)))


def test_median_error_is_under_a_tenth(predictions: list[tuple[float, Interval]]) -> None:
    errors = [abs(predicted.mid / truth - 1) for truth, predicted in predictions]
    assert statistics.median(errors) < 0.10


def test_interval_holds_nine_in_ten(predictions: list[tuple[float, Interval]]) -> None:
    inside = [predicted.low <= truth <= predicted.high for truth, predicted in predictions]
    assert 0.85 <= statistics.fmean(inside) <= 0.95
