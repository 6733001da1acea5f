"""Stored prefixes that were recomputed although restoring them would have been quicker."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._regret import regret
from kvprobe.model import Finding, Verdict


def _detect(ledger: Ledger) -> list[Finding]:
    return regret(
        ledger,
        slug="recompute_loses",
        lost=Verdict.RECOMPUTE_LOST,
        won=Verdict.RECOMPUTE_WON,
        noun="recomputed stored prefixes",
        would_disprove="the same requests with restoring forced taking longer to first token "
        "than with recomputing",
    )


DETECTOR = Detector("recompute_loses", "recomputing cost more than restoring", _detect)
