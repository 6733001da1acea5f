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
    # Of a device that does not follow this engine's prefills, others may be the users.
    found = [
        (gpu.facts.index, gpu.starvation)
        for gpu in ledger.gpus
        if gpu.starvation and gpu.instance is None and _serves(gpu, ledger)
    ]
    found = [each for each in found if each[1].n >= MIN_SAMPLES and each[1].restores]
    covered = sum(each.covered_ns for _, each in found)
    restores = max((each.restores for _, each in found), default=0)
    if restores < MIN_REQUESTS:
        return []
    share = sum(each.starved_ns for _, each in found) / covered
    return [_finding(found, share, restores)] if share >= STARVED_SHARE else []


def _serves(gpu: GpuAccount, ledger: Ledger) -> bool:
    """Whether this engine's prefills run on it, as far as its activity tells."""
    alone = sum(each.instance is None for each in ledger.gpus) == 1
    return bool(gpu.follows_prefills) or (alone and gpu.follows_prefills is None)


def _finding(found: list[tuple[int, Starvation]], share: float, restores: int) -> Finding:
    names = ", ".join(str(index) for index, _ in found)
    each = [one for _, one in found]
    n = sum(one.n for one in each)
    flight = max(one.restore_ns for one in each)
    return Finding(
        slug="gpu_starved_by_restore",
        severity=_severity(share),
        confidence=confidence(restores, share, STARVED_SHARE, WARNING_SHARE),
        subject=f"GPU {names}",
        evidence=(
            Evidence("share of time idle while a restore was in flight", share, "share", n),
            Evidence("GPU time idle meanwhile, sum", sum(o.starved_ns for o in each), "ns", n),
            Evidence("the same, at least", sum(o.low_ns for o in each), "ns", n),
            Evidence("the same, at most", sum(o.high_ns for o in each), "ns", n),
            Evidence("GPU time idle in all, sum", sum(o.idle_ns for o in each), "ns", n),
            Evidence("time with a restore in flight", flight, "ns", restores),
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
