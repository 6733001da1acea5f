"""One path answers more slowly than the other paths to the same namespace, at the same sizes.

Sizes are compared each with itself, and the medians of a size are put together as a mean of their
logarithms' differences, weighted by the commands of the smaller side. The interval is from a
bootstrap over slices of time, since neighbours in time are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import DeviceAccount, Ledger
from kvprobe.findings import Detector
from kvprobe.findings._storage import (
    MIN_COMMANDS,
    at_stake,
    device_share,
    kv_commands,
    path_name,
    restoring,
)
from kvprobe.findings._weigh import confidence, severity
from kvprobe.model import Evidence, Finding, Frame

SLOWER = 1.5
"""Latency over that of its peers. Paths of one target differ by some 10 % through the processors
that serve them; half as long again is a longer way, a worse link or a busier port."""
CERTAIN_SLOWER = 3.0
MIN_LOW = 1.25
"""Low end of the interval."""
MIN_DIFFERENCE_NS = 20_000
"""The noise of an interrupt: no restore would feel a ratio of two latencies that small."""
SLICES = 20
MIN_SLICES = 5
DRAWS = 500
MOST_SIZES = 8
MOST_DRAWN = 10_000
"""Commands that the bootstrap draws from; of more, each so many-th."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Slower:
    """A path against its peers: ratio of latencies with a 90 % interval."""

    device: DeviceAccount
    ratio: float
    low: float
    high: float
    own_ns: float
    peers_ns: float
    own_n: int
    peers_n: int


def _detect(ledger: Ledger) -> list[Finding]:
    rows = kv_commands(ledger)
    paths = [device for device in ledger.kv_devices if device.path]
    if len(paths) < 2 or not rows:
        return []
    compared = [found for device in paths if (found := _compare(rows, device)) is not None]
    slow = [
        found
        for found in compared
        if found.low >= MIN_LOW and found.own_ns - found.peers_ns >= MIN_DIFFERENCE_NS
    ]
    return [_finding(ledger, found) for found in slow]


def _compare(rows: Frame, device: DeviceAccount) -> _Slower | None:
    """Compare one path with the others; None where it is no slower, or too little is known."""
    known = (rows["start_ns"] >= 0) & (rows["done_ns"] >= rows["start_ns"])
    start, took = rows["start_ns"][known], (rows["done_ns"] - rows["start_ns"])[known]
    size, own = rows["bytes"][known], rows["device"][known] == device.facts.device
    sizes = _sizes(size[own], size[~own])
    used = np.isin(size, sizes)
    if not used.any():
        return None
    start, took, size, own = start[used], took[used], size[used], own[used]
    ratio = _ratio(took, size, own, sizes)
    if ratio is None or ratio < SLOWER:
        return None
    some = slice(None, None, 1 + len(start) // MOST_DRAWN)
    draws = _bootstrap(start[some], took[some], size[some], own[some], sizes)
    if draws is None:
        return None
    low, high = np.quantile(draws, [0.05, 0.95]).tolist()
    return _Slower(
        device, ratio, low, high,
        float(np.median(took[own])), float(np.median(took[~own])),
        int(own.sum()), int((~own).sum()),
    )  # fmt: skip


def _sizes(own: Ints, others: Ints) -> list[int]:
    """Sizes that both sides have enough of, the most frequent ones."""
    kinds, counts = np.unique(own, return_counts=True)
    other_kinds, other_counts = np.unique(others, return_counts=True)
    _, mine, theirs = np.intersect1d(kinds, other_kinds, return_indices=True)
    both = np.minimum(counts[mine], other_counts[theirs])
    order = np.argsort(-both, kind="stable")[:MOST_SIZES]
    return [int(kinds[mine[i]]) for i in order if both[i] >= MIN_COMMANDS]


def _ratio(took: Ints, size: Ints, own: NDArray[np.bool_], sizes: Sequence[int]) -> float | None:
    """Ratio of medians over all sizes; None where no size has both sides."""
    logs, weights = [], []
    for value in sizes:
        mine, others = took[own & (size == value)], took[~own & (size == value)]
        if len(mine) and len(others) and np.median(others) > 0 and np.median(mine) > 0:
            logs.append(float(np.log(np.median(mine) / np.median(others))))
            weights.append(min(len(mine), len(others)))
    return float(np.exp(np.average(logs, weights=weights))) if logs else None


def _bootstrap(
    start: Ints, took: Ints, size: Ints, own: NDArray[np.bool_], sizes: Sequence[int]
) -> Floats | None:
    """Ratios of slices of time drawn with replacement; None where time is too short for that."""
    edges = np.quantile(start, np.linspace(0, 1, SLICES + 1))
    place = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, SLICES - 1)
    order = np.argsort(place, kind="stable")
    slices = [part for part in np.split(order, np.searchsorted(place[order], range(1, SLICES)))
              if len(part)]  # fmt: skip
    if len(slices) < MIN_SLICES:
        return None
    random = np.random.default_rng(len(start))
    ratios = []
    for _ in range(DRAWS):
        drawn = np.concatenate([slices[i] for i in random.integers(0, len(slices), len(slices))])
        ratio = _ratio(took[drawn], size[drawn], own[drawn], sizes)
        if ratio is not None:
            ratios.append(ratio)
    return np.array(ratios) if len(ratios) >= DRAWS / 2 else None


def _finding(ledger: Ledger, found: _Slower) -> Finding:
    share = found.own_n / (found.own_n + found.peers_n)
    requests = restoring(ledger)
    device = device_share(requests)
    cost = None if device is None else device * share * (1 - 1 / found.ratio)
    evidence = [
        Evidence("latency over that of its peers at the same size", found.ratio, "x", found.own_n),
        Evidence("low end of that ratio at 90 %", found.low, "x", found.own_n),
        Evidence("high end of that ratio at 90 %", found.high, "x", found.own_n),
        Evidence("its median latency", found.own_ns, "ns", found.own_n),
        Evidence("median latency of its peers", found.peers_ns, "ns", found.peers_n),
        Evidence("share of the commands that use it", share, "share", found.own_n),
        *_segment_evidence(ledger, found.device),
    ]
    return Finding(
        slug="slow_path",
        severity=severity(None if cost is None else at_stake(requests, cost)),
        confidence=confidence(found.own_n, found.ratio, SLOWER, CERTAIN_SLOWER),
        subject=path_name(found.device),
        evidence=tuple(evidence),
        would_disprove="reads of one size that take as long over this path as over its peers "
        "when each is used alone",
    )


def _segment_evidence(ledger: Ledger, slow: DeviceAccount) -> list[Evidence]:
    """The segment in which this path loses most against the best of its peers."""
    peers = [d for d in ledger.kv_devices if d.path and d is not slow and d.segments]
    own = {segment.parts: segment for segment in slow.segments}
    gaps = []
    for parts, segment in own.items():
        others = [s.median_ns for d in peers for s in d.segments if s.parts == parts]
        if others:
            gaps.append((segment.median_ns - min(others), parts, segment.n))
    if len(own) < 2 or not gaps:
        return []
    gap, parts, n = max(gaps)
    name = " + ".join(part.replace("_", " ") for part in parts)
    return [Evidence(f"median time more than its peers in: {name}", gap, "ns", n)]


DETECTOR = Detector("slow_path", "one path answers more slowly than its peers", _detect)
