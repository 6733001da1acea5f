"""Restore or recompute: both routes' cost for one request, the verdict, and the break-even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvprobe.correlator import cost_model
from kvprobe.correlator.cost_model import CostModel
from kvprobe.correlator.ledger import Account, BreakEven, BreakEvenPoint
from kvprobe.model import Interval, Verdict

CURVE_POINTS = 24


@dataclass(frozen=True)
class Routes:
    """The two fitted models; either is None when there was not enough to fit."""

    recompute: CostModel | None
    restore: CostModel | None

    @classmethod
    def fit(cls, accounts: Sequence[Account]) -> Routes:
        """Fit recompute on requests with a timed prefill, restore on those that restored."""
        computed = [
            (a.computed_tokens, max(a.prompt_tokens - a.computed_tokens, 0), a.spans.prefill_ns)
            for a in accounts
            if a.spans and a.spans.prefill_ns > 0 and a.computed_tokens and a.prompt_tokens
        ]
        new, context, prefill = np.array(computed, float).reshape(-1, 3).T
        restored = [
            (a.restore.bytes, a.restore.exposed_ns)
            for a in accounts
            # A restore partly hidden behind prefill is no measure of what a restore takes.
            if a.restore and a.restore.bytes > 0 and a.restore.hidden_ns == 0
        ]
        size, took = np.array(restored, float).reshape(-1, 2).T
        return cls(
            cost_model.fit(cost_model.prefill_terms(new, context), prefill / 1e9, new),
            cost_model.fit(cost_model.restore_terms(size), took / 1e9, size),
        )

    def recompute_ns(self, stored: int, computed: int, prompt: int) -> Interval | None:
        """Extra prefill time if ``stored`` tokens were computed as well.

        The difference of two prefills, so the part that is paid either way cancels.
        """
        if self.recompute is None or stored <= 0:
            return None
        context = max(prompt - computed - stored, 0)
        if not self.recompute.reaches(stored + computed):
            return None
        whole = self.recompute.seconds(cost_model.prefill_terms(stored + computed, context))
        rest = self.recompute.seconds(cost_model.prefill_terms(computed, context + stored))
        return self.recompute.interval_ns(max(whole - rest, 0.0))

    def restore_ns(self, size_bytes: float) -> Interval | None:
        """Cost of restoring ``size_bytes`` on this node."""
        if self.restore is None or not self.restore.reaches(size_bytes):
            return None
        return self.restore.interval_ns(self.restore.seconds(cost_model.restore_terms(size_bytes)))


def judge(account: Account, routes: Routes, bytes_per_token: float | None) -> Account:
    """Complete an account with both routes' costs and the verdict.

    A verdict needs an interval of the gain that lies on one side of zero; else it is unknown.
    """
    if account.computed_tokens is None or account.prompt_tokens is None or account.vague:
        return account
    if account.restore is not None and account.restore.bytes > 0:
        tokens = account.storage_hit_tokens
        if not tokens and bytes_per_token:
            tokens = round(account.restore.bytes / bytes_per_token)
        recompute = routes.recompute_ns(tokens or 0, account.computed_tokens, account.prompt_tokens)
        if recompute is None:
            return account
        exposed = account.restore.exposed_ns
        gain = _shift(recompute, -exposed)
        verdict = _verdict(gain, Verdict.RESTORE_WON, Verdict.RESTORE_LOST)
        return replace(account, recompute_ns=recompute, gain_ns=gain, verdict=verdict)
    # The engine computed what storage held: the mirror image. What device memory held as well was
    # not computed; where an engine tests only what lies beyond, this makes the loss too small.
    stored = (account.stored_tokens or 0) - (account.device_hit_tokens or 0)
    if stored <= 0 or account.storage_hit_tokens or not bytes_per_token:
        return account
    computed = max(account.computed_tokens - stored, 0)
    recompute = routes.recompute_ns(stored, computed, account.prompt_tokens)
    restore = routes.restore_ns(stored * bytes_per_token)
    if recompute is None or restore is None:
        return replace(account, recompute_ns=recompute, restore_estimate_ns=restore)
    gain = Interval(
        restore.mid - recompute.mid,
        restore.low - recompute.high,
        restore.high - recompute.low,
        min(restore.n, recompute.n),
    )
    verdict = _verdict(gain, Verdict.RECOMPUTE_WON, Verdict.RECOMPUTE_LOST)
    return replace(
        account,
        recompute_ns=recompute,
        restore_estimate_ns=restore,
        gain_ns=gain,
        verdict=verdict,
    )


def _shift(interval: Interval, by: float) -> Interval:
    return replace(interval, mid=interval.mid + by, low=interval.low + by, high=interval.high + by)


def _verdict(gain: Interval, won: Verdict, lost: Verdict) -> Verdict:
    if gain.low > 0:
        return won
    return lost if gain.high < 0 else Verdict.UNKNOWN


def break_even(
    routes: Routes, accounts: Sequence[Account], bytes_per_token: float | None
) -> BreakEven:
    """Both routes over prefix length, and where they cross.

    The rest of the prompt is taken at its median. ``tokens.low`` is the first length at which
    restoring may pay (its low bound under recompute's high bound; 0 where it may at every measured
    length), ``tokens.high`` the first from which it surely pays. Where the routes do not cross
    inside what was measured, or never surely, ``tokens`` is None, with a note.
    """
    curve = _curve(routes, accounts, bytes_per_token)
    recompute, restore = routes.recompute, routes.restore
    found, note = _crossing(curve)
    if recompute is None or restore is None:
        few = "recompute" if recompute is None else "restore"
        note = f"not enough requests to fit the {few} model (it needs {cost_model.MIN_SAMPLES})"
    return BreakEven(
        tokens=found,
        curve=curve,
        recompute_coefficients=_three(recompute.coefficients) if recompute else None,
        recompute_n=recompute.n if recompute else 0,
        recompute_error=recompute.error if recompute else None,
        restore_coefficients=(restore.coefficients[0], restore.coefficients[1])
        if restore
        else None,
        restore_n=restore.n if restore else 0,
        note=note,
    )


def _three(values: tuple[float, ...]) -> tuple[float, float, float]:
    return values[0], values[1], values[2]


def _curve(
    routes: Routes, accounts: Sequence[Account], bytes_per_token: float | None
) -> tuple[BreakEvenPoint, ...]:
    if routes.recompute is None or routes.restore is None or not bytes_per_token:
        return ()
    rest = [a.computed_tokens for a in accounts if a.computed_tokens and a.restore]
    other = round(float(np.median(rest))) if rest else 0
    top = min(
        routes.restore.sizes[1] / bytes_per_token,
        routes.recompute.sizes[1] * cost_model.REACH - other,
    )
    low = max(routes.restore.sizes[0] / bytes_per_token / 4, 1)
    if top <= low:
        return ()
    points = []
    for tokens in np.unique(np.geomspace(low, top, CURVE_POINTS).round().astype(int)).tolist():
        recompute = routes.recompute_ns(tokens, other, tokens + other)
        restore = routes.restore_ns(tokens * bytes_per_token)
        if recompute is not None and restore is not None:
            points.append(BreakEvenPoint(tokens, restore, recompute))
    return tuple(points)


def _crossing(curve: tuple[BreakEvenPoint, ...]) -> tuple[Interval | None, str]:
    if not curve:
        return None, "no length was measured on both routes"
    mid = _first(curve, [p.recompute.mid - p.restore.mid for p in curve])
    low = _first(curve, [p.recompute.high - p.restore.low for p in curve])
    high = _first(curve, [p.recompute.low - p.restore.high for p in curve])
    n = min(curve[0].recompute.n, curve[0].restore.n)
    first, last = curve[0].tokens, curve[-1].tokens
    if mid is not None and low is not None and high is not None and mid > first:
        return Interval(mid, low if low > first else 0.0, high, n), ""
    if mid is None:
        return None, f"recomputing is cheaper at every measured length ({first} to {last} tokens)"
    if mid <= first:
        return None, f"restoring is cheaper at every measured length ({first} to {last} tokens)"
    return None, f"the routes cross near {mid:.0f} tokens, but too uncertainly to say where"


def _first(curve: tuple[BreakEvenPoint, ...], advantage: list[float]) -> float | None:
    """Length from which the advantage stays positive, linear between points; None: never.

    The first point's length where it is positive all along.
    """
    negative = [i for i, value in enumerate(advantage) if value <= 0]
    if not negative:
        return float(curve[0].tokens)
    i = negative[-1]
    if i + 1 >= len(curve):
        return None
    below, above = advantage[i], advantage[i + 1]
    return curve[i].tokens + (curve[i + 1].tokens - curve[i].tokens) * -below / (above - below)
