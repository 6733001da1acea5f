"""Buffered "storage" reads that memory served: the storage figure is not what it seems."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import confidence, device_name
from kvprobe.model import Evidence, Finding

MIN_READS = 30
MASKED_SHARE = 0.2
"""Of the bytes asked for: from here on a rate taken above the page cache is off by a quarter."""
CERTAIN_MASKED_SHARE = 0.6


def _detect(ledger: Ledger) -> list[Finding]:
    ahead = ledger.read_ahead
    if ahead is None or ahead.ops < MIN_READS or ahead.asked_bytes <= 0:
        return []
    # What read-ahead brought for an earlier read did come from the device: it is no mask.
    delivered = ahead.device_bytes - ahead.unused_bytes
    masked = max(0, min(ahead.cached_bytes, ahead.asked_bytes - delivered)) / ahead.asked_bytes
    if masked < MASKED_SHARE:
        return []
    return [
        Finding(
            slug="page_cache_masks",
            severity="warning" if masked >= CERTAIN_MASKED_SHARE else "info",
            confidence=confidence(ahead.ops, masked, MASKED_SHARE, CERTAIN_MASKED_SHARE),
            subject=device_name(ledger),
            evidence=(
                Evidence("share of bytes served from memory", masked, "share", ahead.ops),
                Evidence("reads no device request served", ahead.ops_without_device, "", ahead.ops),
                Evidence("bytes buffered reads asked for", ahead.asked_bytes, "B", ahead.ops),
                Evidence("bytes the device read for them", ahead.device_bytes, "B", ahead.ops),
            ),
            would_disprove="restores as quick after the page cache was dropped as before",
        )
    ]


DETECTOR = Detector("page_cache_masks", "memory served reads that count as storage", _detect)
