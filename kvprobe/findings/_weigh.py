"""What detectors share: which requests count, and how sure and how grave a finding is.

Confidence follows one rule, ``confidence``; severity another, ``severity``. Both are stated here
so that a reader of a report can check a figure by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.correlator.ledger import Account, Ledger, Restore
from kvprobe.model import Interval

MIN_REQUESTS = 8
"""Below this, one odd request is more than a tenth of all: nothing is said."""
HALF_SURE = 8
"""Samples at which the count alone makes a finding half sure."""
NEVER_CERTAIN = 0.99
WARNING_SHARE = 0.05
"""Share of the time to first token at stake from which a finding is a warning: what an A B B A
comparison of some hundred requests can just tell apart."""
CRITICAL_SHARE = 0.25
DRAWS = 1000


@dataclass(frozen=True)
class Restored:
    """A request that read KV cache from storage."""

    account: Account
    restore: Restore


def restored(ledger: Ledger) -> list[Restored]:
    """The requests that restored something."""
    return [
        Restored(a, a.restore)
        for a in ledger.accounts
        if a.restore is not None and a.restore.bytes > 0 and a.restore.ops > 0
    ]


def confidence(n: int, effect: float, threshold: float, certain: float) -> float:
    """How sure a finding is: ``n / (n + 8)`` times ``(1 + margin) / 2``.

    ``margin`` is how far ``effect`` lies from the ``threshold`` that fires (0) towards the value
    beyond which nobody would doubt it, ``certain`` (1). So a finding at its threshold is at most
    half sure, and one behind few samples never is sure; none is certain.
    """
    margin = (effect - threshold) / (certain - threshold)
    sure = n / (n + HALF_SURE) * (1 + min(max(margin, 0.0), 1.0)) / 2
    return min(round(sure, 3), NEVER_CERTAIN)


def severity(at_stake: float | None) -> str:
    """By the share of the time to first token that the symptom costs; unknown is a warning."""
    if at_stake is None:
        return "warning"
    if at_stake >= CRITICAL_SHARE:
        return "critical"
    return "warning" if at_stake >= WARNING_SHARE else "info"


def unmeasured_severity(at_stake: float | None) -> str:
    """As ``severity``, but a gain that nothing measured is not critical."""
    return min(severity(at_stake), "warning", key=("info", "warning", "critical").index)


def share_of_ttft(costs: Iterable[tuple[float, Account]]) -> float | None:
    """Costs in ns of requests as a share of their summed time to first token; None if unknown.

    A request that was cut off has no such time: its cost is left out too.
    """
    known = [(cost, a.ttft_ns) for cost, a in costs if a.ttft_ns]
    return sum(cost for cost, _ in known) / sum(ttft for _, ttft in known) if known else None


def engine_name(ledger: Ledger) -> str:
    """The engine as a finding's subject."""
    return ledger.engine.name if ledger.engine and ledger.engine.name else "engine"


def device_name(ledger: Ledger) -> str:
    """The device that served the KV reads as a finding's subject; the ledger lists it first."""
    return ledger.devices[0].facts.name if ledger.devices else "storage"


def regret_sum(gains: Sequence[Interval], lost: Sequence[bool], n: int) -> Interval:
    """Summed regret of the requests that lost, in ns, with a 90 % bootstrap interval.

    Requests are drawn with replacement, and each draw of a request draws its gain from a normal
    distribution as wide as the gain's own interval. Seeded: one ledger gives one figure.
    """
    mid, low, high = np.array([(g.mid, g.low, g.high) for g in gains], float).reshape(-1, 3).T
    counts = np.array(lost, bool)
    random = np.random.default_rng(len(gains))
    pick = random.integers(0, len(gains), (DRAWS, len(gains)))
    sigma = np.maximum(high - low, 0) / (2 * 1.645)
    drawn = mid[pick] + sigma[pick] * random.standard_normal(pick.shape)
    sums = np.where(counts[pick], -drawn, 0.0).sum(axis=1)
    bottom, top = np.quantile(sums, [0.05, 0.95])
    return Interval(float(-mid[counts].sum()), float(bottom), float(top), n)
