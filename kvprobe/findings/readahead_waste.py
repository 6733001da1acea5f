"""Buffered reads made the device read bytes that nobody asked for."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import confidence, device_name
from kvprobe.model import Evidence, Finding

MIN_READS = 30
MIN_DEVICE_BYTES = 16 << 20
"""A hundred read-ahead windows of the usual 128 KiB; fewer say nothing about a habit."""
WASTE_SHARE = 0.2
"""Of what the device read: the last window of a file that is read to its end wastes less."""
CERTAIN_WASTE_SHARE = 0.5
WASTED = "share of bytes the device read that nobody asked for"


def _detect(ledger: Ledger) -> list[Finding]:
    ahead = ledger.read_ahead
    if ahead is None or ahead.ops < MIN_READS or ahead.device_bytes < MIN_DEVICE_BYTES:
        return []
    waste = ahead.unused_bytes / ahead.device_bytes
    if waste < WASTE_SHARE:
        return []
    return [
        Finding(
            slug="readahead_waste",
            severity="warning" if waste >= CERTAIN_WASTE_SHARE else "info",
            confidence=confidence(ahead.ops, waste, WASTE_SHARE, CERTAIN_WASTE_SHARE),
            subject=device_name(ledger),
            evidence=(
                Evidence(WASTED, waste, "share", ahead.ops),
                Evidence("bytes read and not asked for", ahead.unused_bytes, "B", ahead.ops),
                Evidence("bytes the device read", ahead.device_bytes, "B", ahead.ops),
                Evidence("bytes buffered reads asked for", ahead.asked_bytes, "B", ahead.ops),
            ),
            would_disprove="a longer capture in which later reads ask for those bytes",
        )
    ]


DETECTOR = Detector("readahead_waste", "the device read bytes that nobody asked for", _detect)
