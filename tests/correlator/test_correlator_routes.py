"""Restore or recompute: verdicts against known costs, break-even against its own formula."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.correlator import CLASSES, Account, correlate, routes
from kvprobe.correlator.cost_model import CostModel
from kvprobe.correlator.ledger import Restore, Spans
from kvprobe.correlator.routes import Routes
from kvprobe.model import Verdict
from tests.correlator.simulate import A_S, B_S, BYTES_PER_TOKEN, C_S, UNIT_TOKENS, Node

BYTES = 4096.0
"""A token in the hand-made accounts."""


def account(
    prompt: int,
    computed: int,
    prefill_s: float | None = None,
    restore_s: float | None = None,
    hidden_s: float = 0.0,
    **more: Any,
) -> Account:
    """A request that restored ``prompt - computed`` tokens, or none where ``restore_s`` is None."""
    hit = prompt - computed if restore_s is not None else 0
    restore = None
    if restore_s is not None:
        exposed, hidden = round(restore_s * 1e9), round(hidden_s * 1e9)
        restore = Restore(round(hit * BYTES), 1, 1, exposed, hidden, exposed, 0, 0, 0, 1.0)
    cut = None
    if prefill_s is not None:
        cut = Spans(0, 0, 0, 0, 0, round(prefill_s * 1e9), 0)
    plain = Account(
        id="x",
        arrival_ns=0,
        ttft_ns=None,
        prompt_tokens=prompt,
        device_hit_tokens=0,
        storage_hit_tokens=hit,
        computed_tokens=computed,
        stored_tokens=hit,
        spans=cut,
        restore=restore,
        recompute_ns=None,
        restore_estimate_ns=None,
        verdict=Verdict.UNKNOWN,
        gain_ns=None,
        attribution=dict.fromkeys(CLASSES, 0.0),
    )
    return replace(plain, **more)


def models(spread: float = 0.1) -> Routes:
    """Recompute 10 us a token; restore 1 ms and 1 ns a byte; both within ``spread``."""
    ratios = (1 - spread, 1 + spread)
    return Routes(
        CostModel((0.005, 10e-6, 0.0), *ratios, (16, 10_000), 53, 0.01),
        CostModel((0.001, 1e-9), *ratios, (1e5, 4e7), 47, 0.01),
    )


def test_recompute_is_the_difference_of_two_prefills() -> None:
    cost = CostModel((0.005, 10e-6, 2e-9), 0.9, 1.1, (16, 10_000), 53, 0.01)
    interval = Routes(cost, None).recompute_ns(1000, 100, 1500)
    assert interval
    # Behind 400 tokens of device memory: 1100 new instead of 100 new behind 1400.
    linear = 10e-6 * 1000
    attention = 2e-9 * (1100 * (400 + 550) - 100 * (1400 + 50))
    assert interval.mid == pytest.approx((linear + attention) * 1e9)
    assert (interval.low, interval.high) == pytest.approx((0.9 * interval.mid, 1.1 * interval.mid))


@pytest.mark.parametrize(
    "restore_s, verdict, gain_ms",
    [
        (0.0080, Verdict.RESTORE_WON, 2.0),
        (0.0089, Verdict.RESTORE_WON, 1.1),
        (0.0091, Verdict.UNKNOWN, 0.9),
        (0.0109, Verdict.UNKNOWN, -0.9),
        (0.0111, Verdict.RESTORE_LOST, -1.1),
        (0.0300, Verdict.RESTORE_LOST, -20.0),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side_of_zero(
    restore_s: float, verdict: Verdict, gain_ms: float
) -> None:
    judged = routes.judge(account(1100, 100, restore_s=restore_s), models(), BYTES)
    assert judged.verdict == verdict
    assert judged.gain_ns
    assert judged.gain_ns.mid == pytest.approx(gain_ms * 1e6)
    assert judged.gain_ns.high - judged.gain_ns.low == pytest.approx(2e6)


@pytest.mark.parametrize(
    "stored, verdict",
    [(16, Verdict.RECOMPUTE_WON), (170, Verdict.UNKNOWN), (1600, Verdict.RECOMPUTE_LOST)],
)
def test_a_stored_prefix_that_was_computed_is_the_mirror_image(
    stored: int, verdict: Verdict
) -> None:
    # Recompute 10 us a token, restore 1 ms and 4.096 us a token: equal at 170 tokens.
    judged = routes.judge(account(2000, 2000, stored_tokens=stored), models(), BYTES)
    assert judged.verdict == verdict
    assert judged.gain_ns and judged.recompute_ns and judged.restore_estimate_ns
    assert judged.restore_estimate_ns.mid == pytest.approx(1e6 + stored * BYTES)
    assert judged.gain_ns.mid == pytest.approx(1e6 + stored * BYTES - stored * 1e4)
    assert judged.gain_ns.low == judged.restore_estimate_ns.low - judged.recompute_ns.high


def test_what_device_memory_held_was_not_recomputed() -> None:
    held = account(1605, 5, stored_tokens=1600, device_hit_tokens=1600)
    assert routes.judge(held, models(), BYTES).verdict == Verdict.UNKNOWN
    half = account(1605, 805, stored_tokens=1600, device_hit_tokens=800)
    judged = routes.judge(half, models(), BYTES)
    assert judged.restore_estimate_ns
    assert judged.restore_estimate_ns.mid == pytest.approx(1e6 + 800 * BYTES)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": None},
        {"computed_tokens": None},
        {"prompt_tokens": 20_000, "computed_tokens": 14_500},
    ],
    ids=str,
)
def test_what_is_not_known_or_was_never_measured_has_no_verdict(change: dict[str, Any]) -> None:
    judged = routes.judge(replace(account(1100, 100, restore_s=0.001), **change), models(), BYTES)
    assert judged.verdict == Verdict.UNKNOWN
    assert judged.gain_ns is None


def test_estimates_are_not_extrapolated() -> None:
    fitted = models()
    assert fitted.recompute_ns(15_000 - 100, 100, 15_000) is not None
    assert fitted.recompute_ns(15_001 - 100, 100, 15_001) is None
    assert fitted.restore_ns(6e7) is not None
    assert fitted.restore_ns(6.01e7) is None
    assert Routes(None, None).recompute_ns(100, 10, 110) is None
    assert Routes(None, None).restore_ns(1e6) is None


def test_hidden_restores_do_not_teach_what_a_restore_costs() -> None:
    seen = [account(100 * i + 50, 50, 0.01, 0.002 * i) for i in range(1, 31)]
    hidden = [account(100 * i + 50, 50, 0.01, 1e-6, hidden_s=0.002 * i) for i in range(1, 31)]
    fitted = Routes.fit(seen + hidden)
    assert fitted.restore
    assert fitted.restore.n == 30
    assert fitted.restore.coefficients[1] == pytest.approx(0.002 / (100 * BYTES), rel=1e-6)


def law(new: float, context: float) -> float:
    return A_S + B_S * new + C_S * new * (context + new / 2)


@pytest.mark.parametrize("read_ns, won, lost", [(30_000, 0.9, 0.0), (900_000, 0.0, 0.95)])
def test_verdicts_turn_with_the_speed_of_the_disk(read_ns: int, won: float, lost: float) -> None:
    ledger = correlate(
        Node(3, 4, requests=131, read_ns=read_ns, software_ns=10_000).run().capture()
    )
    verdicts = [a.verdict for a in ledger.accounts]
    assert verdicts.count(Verdict.RESTORE_WON) >= won * len(verdicts)
    assert verdicts.count(Verdict.RESTORE_LOST) >= lost * len(verdicts)
    if won:
        assert verdicts.count(Verdict.RESTORE_LOST) <= 2
    else:
        assert verdicts.count(Verdict.RESTORE_WON) == 0


def test_verdicts_agree_with_the_truth_where_the_routes_are_close() -> None:
    judged = wrong = 0
    for seed in (3, 5, 7):
        ledger = correlate(Node(seed, 1, requests=131, read_ns=120_000, noise=0.02).run().capture())
        for a in ledger.accounts:
            assert a.restore and a.computed_tokens and a.prompt_tokens
            saved = law(a.prompt_tokens, 0) - law(
                a.computed_tokens, a.prompt_tokens - a.computed_tokens
            )
            if a.verdict != Verdict.UNKNOWN:
                judged += 1
                wrong += (a.verdict == Verdict.RESTORE_WON) != (saved * 1e9 > a.restore.exposed_ns)
    assert judged > 60
    assert wrong <= 0.05 * judged


@pytest.mark.parametrize(
    "read_ns, verdict", [(30_000, Verdict.RECOMPUTE_LOST), (900_000, Verdict.RECOMPUTE_WON)]
)
def test_a_policy_that_computes_short_prefixes(read_ns: int, verdict: Verdict) -> None:
    node = Node(3, 4, requests=211, read_ns=read_ns, software_ns=10_000, compute_below=12).run()
    ledger = correlate(node.capture())
    skipped = [a for a in ledger.accounts if not a.storage_hit_tokens]
    assert 29 < len(skipped) < 101
    assert all(a.stored_tokens and a.restore is None for a in skipped)
    assert sum(a.verdict == verdict for a in skipped) >= 0.9 * len(skipped)
    restored = [a for a in ledger.accounts if a.storage_hit_tokens]
    kept = Verdict.RESTORE_WON if verdict == Verdict.RECOMPUTE_LOST else Verdict.RESTORE_LOST
    assert sum(a.verdict == kept for a in restored) >= 0.9 * len(restored)


def population(
    seed: int, restore: tuple[float, float], prefill: tuple[float, float, float], n: int = 211
) -> list[Account]:
    """Requests under two known laws: seconds fixed and a token, and ``a, b, c`` of prefill."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        stored, rest = int(rng.integers(64, 8009)), int(rng.integers(40, 60))
        new = rest if i % 2 else stored + rest
        context = stored + rest - new
        took = prefill[0] + prefill[1] * new + prefill[2] * new * (context + new / 2)
        restored = restore[0] + restore[1] * stored if i % 2 else None
        noise = rng.normal(1, 0.05, 2)
        found.append(
            account(
                stored + rest,
                new,
                took * noise[0],
                None if restored is None else restored * noise[1],
            )
        )
    return found


def test_break_even_lies_where_the_two_laws_cross() -> None:
    restore, prefill = (0.02, 8e-6), (0.004, 12e-6, 2e-9)
    # 0.02 + 8e-6 t = 12e-6 t + 1e-9 t^2, whatever is computed after it.
    crossing = (-4e-6 + math.sqrt(16e-12 + 4 * 1e-9 * 0.02)) / 2e-9
    inside = []
    for seed in range(20):
        accounts = population(seed, restore, prefill)
        found = routes.break_even(Routes.fit(accounts), accounts, BYTES)
        assert found.tokens, found.note
        assert found.note == ""
        assert found.tokens.mid == pytest.approx(crossing, rel=0.1)
        inside.append(found.tokens.low <= crossing <= found.tokens.high)
        assert found.tokens.low > 64
        assert (found.recompute_n, found.restore_n) == (211, 105)
    assert all(inside)


@pytest.mark.parametrize(
    "restore, note",
    [
        ((0.5, 30e-6), "recomputing is cheaper at every measured length"),
        ((0.0, 1e-6), "restoring is cheaper at every measured length"),
        ((0.051, 5e-6), "too uncertainly"),
    ],
)
def test_break_even_says_why_there_is_none(restore: tuple[float, float], note: str) -> None:
    accounts = population(3, restore, (0.004, 12e-6, 0.0))
    found = routes.break_even(Routes.fit(accounts), accounts, BYTES)
    assert found.tokens is None
    assert note in found.note
    assert len(found.curve) > 10


def test_break_even_without_enough_requests() -> None:
    accounts = population(3, (0.02, 8e-6), (0.004, 12e-6, 2e-9), n=31)
    found = routes.break_even(Routes.fit(accounts), accounts, BYTES)
    assert found.tokens is None
    assert "not enough requests to fit the restore model" in found.note
    assert (found.recompute_n, found.restore_n, found.curve) == (31, 0, ())
    none = routes.break_even(Routes.fit([]), [], BYTES)
    assert "recompute" in none.note
    assert "no length" in routes.break_even(models(), [], None).note


def test_the_curve_stays_inside_what_was_measured() -> None:
    accounts = population(3, (0.02, 8e-6), (0.004, 12e-6, 2e-9))
    found = routes.break_even(Routes.fit(accounts), accounts, BYTES)
    longest = max(a.restore.bytes for a in accounts if a.restore) / BYTES
    tokens = [point.tokens for point in found.curve]
    assert tokens == sorted(set(tokens))
    assert tokens[0] > 0
    assert tokens[-1] <= longest + 1
    for point in found.curve:
        assert point.restore.low <= point.restore.mid <= point.restore.high
        assert point.recompute.low <= point.recompute.mid <= point.recompute.high


def test_a_bound_below_the_curve_is_zero() -> None:
    fitted = Routes(
        CostModel((0.005, 10e-6, 0.0), 0.9, 40.0, (16, 10_000), 53, 0.01),
        CostModel((0.001, 1e-9), 0.9, 1.1, (1e6, 4e7), 47, 0.01),
    )
    found = routes.break_even(fitted, [], BYTES).tokens
    assert found
    assert found.low == 0
    assert found.mid == pytest.approx(0.001 / (10e-6 - 1e-9 * BYTES), rel=0.02)


def test_rate_of_bytes_a_token_is_measured_where_the_engine_does_not_tell() -> None:
    node = Node(3, 1, requests=131, read_ns=30_000).run()
    silent = {"unit_bytes": None, "bytes_per_token": None}
    told, measured = correlate(node.capture()), correlate(node.capture(**silent))
    assert told.break_even == measured.break_even
    first = measured.accounts[0]
    assert first.restore and first.storage_hit_tokens
    assert first.restore.bytes == first.storage_hit_tokens * BYTES_PER_TOKEN
    assert first.storage_hit_tokens % UNIT_TOKENS == 0
