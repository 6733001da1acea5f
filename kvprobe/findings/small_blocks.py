"""The fixed cost of each read outweighs moving its bytes: the unit is below the efficient size.

The time of a read is taken as ``alpha + bytes / beta`` (Hockney's line). Below ``alpha * beta``,
the size of half performance, more than half of the time is the fixed cost. Three kinds of
evidence give ``alpha``, each where the capture has it; the finding says which one it rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    Restored,
    confidence,
    engine_name,
    restored,
    severity,
    share_of_ttft,
)
from kvprobe.model import Evidence, Finding
from kvprobe.schema import OpKind

MIN_READS = 4
"""A restore of fewer units gains nothing by larger ones."""
FIXED_SHARE = 0.5
"""The size of half performance: below it most of the time is fixed cost."""
CERTAIN_FIXED_SHARE = 0.9
COPY_BYTES_PER_S = 2 * 2**30
"""Software time that may be copying bytes at a slow memory's rate is no fixed cost."""
MIN_SIZES = 3
"""Distinct sizes that make a line; two points always lie on one."""
MIN_SIZE_RATIO = 4.0
"""Largest over smallest size: over a shorter span noise decides the slope."""
MIN_OPS_A_SIZE = 10


@dataclass(frozen=True)
class _Fixed:
    """Share of a read's time that does not depend on its size, and what says so."""

    share: float
    n: int
    how: str
    trust: float
    """Factor on the confidence."""


def _detect(ledger: Ledger) -> list[Finding]:
    requests = [r for r in restored(ledger) if r.restore.ops >= MIN_READS]
    if len(requests) < MIN_REQUESTS:
        return []
    ops = sum(r.restore.ops for r in requests)
    size = sum(r.restore.bytes for r in requests) / ops
    exposed = sum(r.restore.exposed_ns for r in requests)
    known = [
        found
        for found in (
            _from_surface(ledger, size),
            _from_sizes(ledger, size),
            _from_split(requests, size),
        )
        if found is not None
    ]
    # Device and engine each have a fixed cost: the finding rests on the clearer one.
    best = max(known, key=lambda found: found.share, default=None)
    if best is None or best.share < FIXED_SHARE or exposed <= 0:
        return []
    at_stake = share_of_ttft((best.share * r.restore.exposed_ns, r.account) for r in requests)
    sure = confidence(len(requests), best.share, FIXED_SHARE, CERTAIN_FIXED_SHARE) * best.trust
    return [
        Finding(
            slug="small_blocks",
            severity=severity(at_stake),
            confidence=round(sure, 3),
            subject=engine_name(ledger),
            evidence=(
                Evidence("bytes a read, mean", size, "B", ops),
                Evidence("reads a restore, mean", ops / len(requests), "", len(requests)),
                Evidence(
                    f"share of a read that is fixed cost, {best.how}", best.share, "share", best.n
                ),
                Evidence("exposed restore a read", exposed / ops, "ns", ops),
                Evidence(
                    "share of time to first token that is fixed cost of reads",
                    at_stake,
                    "share",
                    sum(1 for r in requests if r.account.ttft_ns),
                ),
            ),
            would_disprove="a sweep in which reads of four times the size take about four times "
            "as long",
        )
    ]


def _from_surface(ledger: Ledger, size: float) -> _Fixed | None:
    """From measured cells of one depth: the shallowest with enough sizes."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for device in ledger.devices[:1]:
        for cell in device.surface:
            if min(cell.bytes_per_s, cell.size_bytes, cell.depth) > 0:
                seconds = cell.depth * cell.size_bytes / cell.bytes_per_s
                rows.setdefault(cell.depth, []).append((cell.size_bytes, seconds))
    for _, points in sorted(rows.items()):
        share = _fixed_share(points, size)
        if share is not None:
            return _Fixed(share, len(points), "from measured rates of several sizes", 1.0)
    return None


def _from_sizes(ledger: Ledger, size: float) -> _Fixed | None:
    """From the capture's own reads, where they differ enough in size."""
    ops = ledger.ops
    reads = (ops["kind"] < OpKind.WRITE) & (ops["result"] > 0) & (ops["end_ns"] > ops["start_ns"])
    result = ops["result"][reads]
    took = (ops["end_ns"] - ops["start_ns"])[reads]
    sizes, counts = np.unique(result, return_counts=True)
    points = [
        (float(s), float(np.median(took[result == s])))
        for s in sizes[counts >= MIN_OPS_A_SIZE].tolist()
    ]
    share = _fixed_share(points, size)
    if share is None:
        return None
    return _Fixed(
        share, int(counts[counts >= MIN_OPS_A_SIZE].sum()), "from reads of several sizes", 0.9
    )


def _fixed_share(points: Sequence[tuple[float, float]], size: float) -> float | None:
    """``alpha / (alpha + size / beta)`` of a robust line through (bytes, time); None: no line.

    Theil-Sen: the slope is the median of the slopes of all pairs, so one odd size does not decide.
    """
    if len(points) < MIN_SIZES:
        return None
    sizes, times = np.array(sorted(points), float).T
    if sizes[-1] < MIN_SIZE_RATIO * sizes[0]:
        return None
    first, second = np.triu_indices(len(sizes), 1)
    apart = sizes[second] > sizes[first]
    slopes = (times[second] - times[first])[apart] / (sizes[second] - sizes[first])[apart]
    slope = max(float(np.median(slopes)), 0.0)
    alpha = max(float(np.median(times - slope * sizes)), 0.0)
    whole = alpha + slope * size
    return alpha / whole if whole > 0 else None


def _from_split(requests: Iterable[Restored], size: float) -> _Fixed | None:
    """From the time a read costs above the block layer, less what copying it may take.

    One size cannot tell fixed cost from cost by the byte, so this evidence counts for less.
    """
    parts = [r.restore for r in requests]
    ops = sum(p.ops for p in parts)
    exposed = sum(p.exposed_ns for p in parts)
    if ops <= 0 or exposed <= 0:
        return None
    if any(p.software_ns is None for p in parts):
        return None  # block rows were left out: fixed cost cannot be told from the device's time
    above = sum((p.software_ns or 0) + p.idle_ns for p in parts) / ops
    fixed = max(0.0, above - size / COPY_BYTES_PER_S * 1e9)
    return _Fixed(fixed / (exposed / ops), ops, "from software and idle time between reads", 0.7)


DETECTOR = Detector("small_blocks", "fixed cost of each read outweighs moving its bytes", _detect)
