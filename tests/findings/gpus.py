"""Ledgers with a GPU: idle while restores are in flight, held back by heat, and healthy ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvprobe.correlator.gpu.ledger import GpuAccount, Starvation, Throttling
from kvprobe.correlator.ledger import Ledger
from kvprobe.model import GpuFacts
from tests.findings.ledgers import MS, N, healthy

FACTS = GpuFacts(0, "NVIDIA H100 80GB HBM3", sm_clock_hz=1_980_000_000)


def starvation(n: int, share: float) -> Starvation:
    covered = n * 1000 * MS
    starved = round(share * covered)
    return Starvation(starved, starved // 2, starved * 2, covered // 2, starved, covered, n, n * 8)


def throttling(n: int, held: float, hz: float, slowdown: float | None = None) -> Throttling:
    readings = n * 4
    slow = round(readings * held)
    reasons = {"hw_thermal_slowdown": slow} if slow else {}
    return Throttling(readings, slow, reasons, hz if slow else None, 1.98e9, slowdown, n, n)


def gpu(**changes: Any) -> GpuAccount:
    bare = GpuAccount(FACTS, None, {}, None, (), None, None, (), follows_prefills=True)
    return replace(bare, **changes)


def busy_gpu(n: int = N) -> Ledger:
    """Restores hide behind other work, and the power cap takes a hundredth of the clock."""
    held = throttling(n, 0.9, 1.96e9, 1.01)
    return healthy(n, gpus=(gpu(starvation=starvation(n, 0.02), throttling=held),))


def gpu_of_others(n: int = N) -> Ledger:
    """Idle while restores are in flight, but nobody's prefills run there."""
    other = gpu(starvation=starvation(n, 0.6), follows_prefills=False)
    held = gpu(throttling=throttling(n, 0.9, 0.9e9), follows_prefills=False)
    return healthy(n, gpus=(other, held))


def gpu_starved_by_restore(n: int = N) -> Ledger:
    return healthy(n, gpus=(gpu(starvation=starvation(n, 0.31)),))


def gpu_throttled(n: int = N) -> Ledger:
    return healthy(n, gpus=(gpu(throttling=throttling(n, 0.73, 1.41e9, 1.37)),))


HEALTHY = (busy_gpu, gpu_of_others)
ILL = (gpu_starved_by_restore, gpu_throttled)
