"""What a GPU was held up by, from how much of each limit it used."""

from __future__ import annotations

from kvprobe import units
from kvprobe.correlator.gpu.ledger import Bound, Shares
from kvprobe.model import Interval

BOUND_SHARE = 0.6
"""Of a limit: below it, by the rule of Nsight Compute ("speed of light"), kernels wait for
latencies and not for that unit."""
MOST_OF_TIME = 0.5

_LIMITS = (
    ("hbm", Bound.HBM, "memory bandwidth"),
    ("compute", Bound.COMPUTE, "tensor cores"),
    ("pcie", Bound.PCIE, "PCIe"),
)


def judge(shares: Shares) -> tuple[Bound, str]:
    """The limit that was reached, and in words why there is no answer where there is none.

    A GPU that is idle most of the time is starved if a restore was in flight for most of that, else
    idle. For one that works only intervals that are apart tell: the largest share must be larger
    than each other one, at or above the threshold with its whole interval. Nothing is said while
    a limit is unknown that could be the one.
    """
    active, starved = shares.active, shares.starved
    if active is None:
        return Bound.UNKNOWN, "no samples of its activity"
    if active.high < MOST_OF_TIME:
        # The estimate decides what it idled for: sure bounds of short restores are wide.
        waits = starved is not None and starved.mid >= MOST_OF_TIME * (1 - active.mid)
        return (Bound.STARVED if waits else Bound.IDLE), ""
    if shares.hbm is None or shares.compute is None:
        return Bound.UNKNOWN, "its memory bandwidth or its tensor cores are not counted"
    used = [(found, bound, name) for key, bound, name in _LIMITS if (found := getattr(shares, key))]
    used.sort(key=lambda each: each[0].mid, reverse=True)
    best, bound, name = used[0]
    if best.high < BOUND_SHARE:
        if active.low < MOST_OF_TIME:
            return Bound.UNKNOWN, "partly idle"
        return Bound.LATENCY, ""
    if best.low < BOUND_SHARE:
        return Bound.UNKNOWN, f"{name} used {_range(best)}: too few samples to say"
    close = [other for other in used[1:] if other[0].high >= best.low]
    if close:
        second, _, other = close[0]
        return Bound.UNKNOWN, f"{name} {_range(best)} and {other} {_range(second)} are alike"
    return bound, ""


def _range(share: Interval) -> str:
    return f"{units.share(share.low)} to {units.share(share.high)}"
