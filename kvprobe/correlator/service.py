"""How the storage served: rate at each depth, depth over time, and Little's law as a witness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import DeviceAccount
from kvprobe.model import DeviceFacts, Frame, Interval, ServiceCell
from kvprobe.schema import OpKind

Ints = NDArray[np.int64]

SLICES = 20
"""Time slices whose spread gives a cell's interval."""
MIN_SLICES = 5
MIN_OPS = 30
SAME_SIZE_SHARE = 0.9
"""Share of operations of one size from which a capture speaks for that size."""


def surface(ops: Frame) -> tuple[ServiceCell, ...]:
    """Measured rate of KV reads at each number of reads in flight.

    While ``d`` reads are open the rate is the sum of their own mean rates; a cell is the
    time-weighted mean over all moments with depth ``d``, its interval the 5th to 95th percentile
    of bootstrap means over time slices. Only for a size that nearly all reads share.

    Args:
        ops: KV operations (columns of ``ops``).
    """
    reads = (ops["kind"] < OpKind.WRITE) & (ops["result"] > 0) & (ops["end_ns"] > ops["start_ns"])
    if reads.sum() < MIN_OPS:
        return ()
    result = ops["result"][reads]
    sizes, counts = np.unique(result, return_counts=True)
    if counts.max() < SAME_SIZE_SHARE * len(result):
        return ()
    start, end = ops["start_ns"][reads], ops["end_ns"][reads]
    direct = bool(np.median(ops["direct"][reads]) > 0)
    rate = result / ((end - start) / 1e9)
    low, high, summed, depth = intervals.step_function(start, end, rate)
    cells = []
    for d in np.unique(depth[depth > 0]).tolist():
        at = depth == d
        cell = _cell(low[at], (high - low)[at].astype(float), summed[at])
        if cell is not None:
            mid, bottom, top, n = cell
            cells.append(
                ServiceCell(
                    int(sizes[counts.argmax()]), int(d), direct, mid, bottom, top, n, "capture"
                )
            )
    return tuple(cells)


def _cell(
    start: Ints, weight: NDArray[np.float64], rate: NDArray[np.float64]
) -> tuple[float, float, float, int] | None:
    """Weighted mean with a bootstrap interval over time slices; None with too few slices."""
    edges = np.linspace(start[0], start[-1] + 1, SLICES + 1)
    slot = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, SLICES - 1)
    time = np.bincount(slot, weight, SLICES)
    work = np.bincount(slot, weight * rate, SLICES)
    used = np.flatnonzero(time > 0)
    if len(used) < MIN_SLICES:
        return None
    draws = np.random.default_rng(len(start)).choice(used, (500, len(used)))
    means = work[draws].sum(axis=1) / time[draws].sum(axis=1)
    low, high = np.quantile(means, [0.05, 0.95])
    return float(work.sum() / time.sum()), float(low), float(high), len(used)


def account_devices(
    devices: Sequence[DeviceFacts],
    block: Frame,
    depth: Frame,
    cells: tuple[ServiceCell, ...],
    kv_device: int | None,
) -> tuple[DeviceAccount, ...]:
    """One account for each of ``devices``, the KV device first.

    ``cells`` belong to ``kv_device``, the device most KV reads came from.
    """
    accounts = [
        _account(facts, block, depth, cells if facts.device == kv_device else ())
        for facts in devices
    ]
    return tuple(sorted(accounts, key=lambda a: (a.facts.device != kv_device, a.facts.name)))


def _account(
    facts: DeviceFacts,
    block: Frame,
    depth: Frame,
    cells: tuple[ServiceCell, ...],
) -> DeviceAccount:
    rows = block["device"] == facts.device
    moved = rows & (block["bytes"] > 0)  # a flush is a write of nothing
    reads, writes = moved & (block["op"] == 0), moved & (block["op"] == 1)
    both = rows & (block["queued_ns"] >= 0) & ((block["op"] == 0) | (block["op"] == 1))
    latency = (block["done_ns"] - block["queued_ns"])[both & reads]
    mean, p99, at_zero = _depth(depth, facts.device, 0) or (None, None, None)
    # Little's law: the work in the rows is the integral of the depth, in the time of the sums.
    total = int((block["done_ns"] - block["queued_ns"])[both].sum())
    integral = _integral(depth, facts.device)
    little = total / integral if integral > 0 and both.any() else None
    return DeviceAccount(
        facts=facts,
        mean_depth=mean,
        p99_depth=p99,
        time_at_zero_share=at_zero,
        reads=int(reads.sum()),
        read_bytes=int(block["bytes"][reads].sum()),
        writes=int(writes.sum()),
        write_bytes=int(block["bytes"][writes].sum()),
        read_latency_ns=_quantiles(latency),
        little_ratio=little,
        little_n=int(both.sum()),
        surface=cells,
    )


def _depth(depth: Frame, device: int, direction: int) -> tuple[float, int, float] | None:
    """Mean, 99th percentile and time share at zero of one direction; None without sums."""
    here = (depth["device"] == device) & (depth["direction"] == direction)
    level, time = depth["depth"][here], depth["time_ns"][here]
    total = int(time.sum())
    if total <= 0:
        return None
    levels, place = np.unique(level, return_inverse=True)
    share = np.bincount(place.reshape(-1), time) / total
    place_99 = min(int(np.searchsorted(np.cumsum(share), 0.99)), len(levels) - 1)
    p99 = int(levels[place_99])
    return float((levels * share).sum()), p99, float(share[levels == 0].sum())


def _integral(depth: Frame, device: int) -> int:
    """Depth summed over time, both directions."""
    here = depth["device"] == device
    return int((depth["depth"][here] * depth["time_ns"][here]).sum())


def _quantiles(values: Ints) -> Interval | None:
    if not len(values):
        return None
    low, mid, high = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
    return Interval(mid, low, high, len(values))
