"""Medians with intervals that assume nothing about the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvprobe.model import Interval

LEVEL = 0.9


def median_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The median and the narrowest pair of order statistics around it of at least ``level``.

    The number of samples below the true median is binomial(n, 1/2), whatever the distribution
    (David and Nagaraja, Order Statistics, 7.1). Under 5 samples no pair reaches 90 %: the interval
    is then all that was seen, and ``level`` says how much that is worth.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0, 0.0)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    inward, reached = 0, 1 - 2 * _tail(n, 0)
    while inward + 1 <= (n - 1) // 2 and 1 - 2 * _tail(n, inward + 1) >= level:
        inward += 1
        reached = 1 - 2 * _tail(n, inward)
    return Interval(middle, ordered[inward], ordered[n - 1 - inward], n, max(0.0, reached))


def _tail(n: int, most: int) -> float:
    """Probability of at most ``most`` heads in ``n`` throws of a coin."""
    return float(sum(math.comb(n, k) for k in range(most + 1)) / 2**n)
