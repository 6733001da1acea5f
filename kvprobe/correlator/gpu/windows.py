"""The course of one GPU: what it was held up by, a second or more at a time."""

from __future__ import annotations

import numpy as np

from kvprobe.correlator.gpu.bound import judge
from kvprobe.correlator.gpu.ledger import BoundWindow, Shares
from kvprobe.correlator.gpu.stretches import Stretches, Windows, stretches
from kvprobe.model import Frame, Interval

SECOND_NS = 1_000_000_000
MOST = 120
"""Windows of one capture; a longer one has longer windows."""
LEAST_SAMPLES = 4


def bound_windows(
    rows: Frame, window_ns: tuple[int, int], restoring: Windows, pcie_bytes_per_s: float | None
) -> tuple[BoundWindow, ...]:
    """Windows of equal length in which the GPU was sampled often enough.

    Their shares are means of samples, so their intervals are points, but for the starved time.

    Args:
        rows: the samples of one GPU.
        window_ns: begin and end of the recording.
        restoring: when a restore was in flight.
        pcie_bytes_per_s: the most that the link can carry one way.
    """
    activity = stretches(rows, "graphics_activity_share")
    begin, end = window_ns
    count = int(min(MOST, max(1, (end - begin) // SECOND_NS)))
    edges = np.linspace(begin, end, count + 1).astype(np.int64)
    columns = {
        "hbm": (stretches(rows, "dram_bandwidth_share"), 1.0),
        "compute": (stretches(rows, "tensor_activity_share"), 1.0),
        "pcie": (stretches(rows, "pcie_rx_bytes_per_s"), pcie_bytes_per_s or np.nan),
    }
    found = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = _inside(activity, low, high)
        if len(mine) < LEAST_SAMPLES:
            continue
        told = {
            name: _mean(_inside(samples, low, high), 1 / most)
            for name, (samples, most) in columns.items()
        }
        shares = Shares(_mean(mine, 1.0), starved=_starved(mine, restoring), **told)
        found.append(BoundWindow(low, high, judge(shares)[0], shares, len(mine)))
    return tuple(found)


def _inside(samples: Stretches, low: int, high: int) -> Stretches:
    """Samples whose middle lies in ``[low, high)``."""
    middle = samples.start_ns + samples.length_ns // 2
    return samples.at(slice(*np.searchsorted(middle, (low, high)).tolist()))


def _mean(samples: Stretches, factor: float) -> Interval | None:
    if not len(samples) or np.isnan(factor):
        return None
    value = min(float(np.average(samples.value, weights=samples.length_ns)) * factor, 1.0)
    return Interval(value, value, value, len(samples))


def _starved(activity: Stretches, restoring: Windows) -> Interval:
    """Share of time without a kernel while a restore was in flight: sure bounds, and between."""
    whole = activity.length_ns.astype(np.float64)
    idle = (1 - np.clip(activity.value, 0, 1)) * whole
    restore = activity.overlap_ns(restoring)
    low = float(np.maximum(idle + restore - whole, 0).sum() / whole.sum())
    high = float(np.minimum(idle, restore).sum() / whole.sum())
    return Interval((low + high) / 2, low, high, len(activity))
