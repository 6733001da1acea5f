"""The course of one GPU: what it was held up by, a second or more at a time."""

from __future__ import annotations

import numpy as np

from kvprobe.correlator.gpu.bound import judge
from kvprobe.correlator.gpu.ledger import BoundWindow, Shares
from kvprobe.correlator.gpu.restoring import idle_while_restoring
from kvprobe.correlator.gpu.stretches import Stretches, Windows, scaled, stretches, within
from kvprobe.model import Frame, Interval

SECOND_NS = 1_000_000_000
MOST = 120
"""Windows of one capture; a longer one has longer windows."""
LEAST_SAMPLES = 4


def bound_windows(
    rows: Frame,
    window_ns: tuple[int, int],
    restoring: Windows,
    prefilling: Windows,
    pcie_bytes_per_s: float | None,
) -> tuple[BoundWindow, ...]:
    """Windows of equal length in which the GPU was sampled often enough.

    Their shares are means of samples, so their intervals are points, but for the starved time.
    Memory and tensor cores count over the time with a kernel: what holds work up does not change
    with how little of it there is.

    Args:
        rows: the samples of one GPU.
        window_ns: begin and end of the recording.
        restoring: when a restore was in flight.
        prefilling: when at least one prefill ran.
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
        active = _mean(mine, 1.0)
        told = {
            name: _mean(_inside(samples, low, high), 1 / most)
            for name, (samples, most) in columns.items()
        }
        if active is not None and active.mid > 0:
            for name in ("hbm", "compute"):
                if (share := told[name]) is not None:
                    told[name] = within(scaled(share, 1 / active.mid))
        shares = Shares(active, starved=_starved(mine, restoring, prefilling), **told)
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


def _starved(activity: Stretches, restoring: Windows, prefilling: Windows) -> Interval:
    """Share of time without a kernel while a restore was in flight; the bounds are sure ones."""
    found = idle_while_restoring(activity, restoring, prefilling)
    whole = activity.length_ns.sum()
    mid, low, high = (float(each.sum() / whole) for each in found)
    return Interval(mid, low, high, len(activity))
