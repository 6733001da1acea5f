"""Restores that took longer than recomputing the same tokens would have."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._regret import regret
from kvprobe.model import Finding, Verdict


def _detect(ledger: Ledger) -> list[Finding]:
    return regret(
        ledger,
        slug="restore_loses",
        lost=Verdict.RESTORE_LOST,
        won=Verdict.RESTORE_WON,
        noun="restores",
        would_disprove="the same requests with restoring switched off taking longer to first "
        "token than with it",
    )


DETECTOR = Detector("restore_loses", "restoring cost more than recomputing", _detect)
