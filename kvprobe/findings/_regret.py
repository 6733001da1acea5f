"""The two ways to choose the dearer route: one rule for both."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    confidence,
    engine_name,
    regret_sum,
    severity,
    share_of_ttft,
)
from kvprobe.model import Evidence, Finding, Verdict

MIN_LOST = 3
"""One or two lost choices are accidents."""
LOST_SHARE = 0.05
"""Of the judged choices: gains are 90 % intervals, so chance alone makes a twentieth lose."""
CERTAIN_LOST_SHARE = 0.5
MIN_REGRET_SHARE = 0.01
"""Of the time to first token of all judged requests: below it nobody would notice."""


def regret(
    ledger: Ledger, *, slug: str, lost: Verdict, won: Verdict, noun: str, would_disprove: str
) -> list[Finding]:
    """The finding that one route lost too often and too much; empty where it did not.

    Judged are the requests that took this route and have a gain, undecided ones included.
    """
    restoring = lost == Verdict.RESTORE_LOST
    judged = [
        (a, a.gain_ns)
        for a in ledger.accounts
        if a.gain_ns is not None
        and (
            a.verdict in (lost, won)
            or (
                a.verdict == Verdict.UNKNOWN
                and restoring == (a.restore is not None and a.restore.bytes > 0)
            )
        )
    ]
    losers = [a.verdict == lost for a, _ in judged]
    n, count = len(judged), sum(losers)
    if n < MIN_REQUESTS or count < MIN_LOST or count / n <= LOST_SHARE:
        return []
    total = regret_sum([gain for _, gain in judged], losers, count)
    timed = sum(1 for a, _ in judged if a.ttft_ns)
    of_ttft = share_of_ttft((-gain.mid if a.verdict == lost else 0.0, a) for a, gain in judged)
    if total.low <= 0 or (of_ttft is not None and of_ttft < MIN_REGRET_SHARE):
        return []
    evidence = [
        Evidence(f"{noun} that lost", count, "requests", n),
        Evidence(f"share of {noun} that lost", count / n, "share", n),
        Evidence("time lost by them, sum", total.mid, "ns", count),
        Evidence("time lost by them, low end", total.low, "ns", count),
        Evidence("time lost by them, high end", total.high, "ns", count),
        Evidence("time lost as a share of time to first token", of_ttft, "share", timed),
    ]
    tokens = ledger.break_even.tokens
    if tokens is not None:
        evidence.append(Evidence("break-even prefix length", tokens.mid, "tokens", tokens.n))
    return [
        Finding(
            slug=slug,
            severity=severity(of_ttft),
            confidence=confidence(n, count / n, LOST_SHARE, CERTAIN_LOST_SHARE),
            subject=engine_name(ledger),
            evidence=tuple(evidence),
            would_disprove=would_disprove,
        )
    ]
