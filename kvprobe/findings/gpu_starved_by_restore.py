"""A GPU that had nothing to run while a request waited for its KV cache from storage."""

from __future__ import annotations

from kvprobe.correlator.gpu.ledger import GpuAccount, Starvation
from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import MIN_REQUESTS, confidence
from kvprobe.model import Evidence, Finding

STARVED_SHARE = 0.05
"""Of the sampled time: what a larger or quicker storage tier could give back at most."""
WARNING_SHARE = 0.15
CRITICAL_SHARE = 0.4
MIN_SAMPLES = 40
"""Five seconds of samples."""


def _detect(ledger: Ledger) -> list[Finding]:
    found = []
    for gpu in ledger.gpus:
        starved = gpu.starvation
        # Of a device that does not follow this engine's prefills, others may be the users.
        if starved is None or gpu.instance is not None or not _serves(gpu, ledger):
            continue
        if starved.restores < MIN_REQUESTS or starved.n < MIN_SAMPLES:
            continue
        if starved.starved_ns < STARVED_SHARE * starved.covered_ns:
            continue
        found.append(_finding(gpu, starved))
    return found


def _serves(gpu: GpuAccount, ledger: Ledger) -> bool:
    """Whether this engine's prefills run on it, as far as its activity tells."""
    alone = sum(each.instance is None for each in ledger.gpus) == 1
    return bool(gpu.follows_prefills) or (alone and gpu.follows_prefills is None)


def _finding(gpu: GpuAccount, starved: Starvation) -> Finding:
    share = starved.starved_ns / starved.covered_ns
    n = starved.n
    return Finding(
        slug="gpu_starved_by_restore",
        severity=_severity(share),
        confidence=confidence(starved.restores, share, STARVED_SHARE, WARNING_SHARE),
        subject=f"GPU {gpu.facts.index}",
        evidence=(
            Evidence("share of time idle while a restore was in flight", share, "share", n),
            Evidence("time idle while a restore was in flight", starved.starved_ns, "ns", n),
            Evidence("the same, at least", starved.low_ns, "ns", n),
            Evidence("the same, at most", starved.high_ns, "ns", n),
            Evidence("time with a restore in flight", starved.restore_ns, "ns", starved.restores),
            Evidence("time idle in all", starved.idle_ns, "ns", n),
        ),
        would_disprove="the same load with the KV cache in host memory leaving the GPU as idle "
        "as before",
    )


def _severity(share: float) -> str:
    if share >= CRITICAL_SHARE:
        return "critical"
    return "warning" if share >= WARNING_SHARE else "info"


DETECTOR = Detector(
    "gpu_starved_by_restore", "the GPU idled while restores were in flight", _detect
)
