"""Samples that are means over stretches of time, and what of them belongs to which windows.

A sample covers 0.1 s and more, a prefill or a restore often less. So a value is never read off at
an instant: each sample says how much there was in its stretch, the windows say how much of the
stretch was of which kind, and the mean of each kind is what explains all samples best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.intervals import covered_below
from kvprobe.model import Frame, Interval
from kvprobe.schema import UNKNOWN

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Windows = tuple[Ints, Ints]
"""Starts and ends, sorted and disjoint."""

DRAWS = 100
BLOCK = 8
"""Neighbouring samples are alike, so the bootstrap draws blocks of them: a second each."""


@dataclass(frozen=True)
class Stretches:
    """Disjoint stretches of time in order, each with the mean ``value`` over it."""

    start_ns: Ints
    end_ns: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    @property
    def length_ns(self) -> Ints:
        """How long each is."""
        return self.end_ns - self.start_ns

    def overlap_ns(self, windows: Windows) -> Ints:
        """How much of each stretch the windows cover."""
        below = [covered_below(*windows, at) for at in (self.start_ns, self.end_ns)]
        return below[1] - below[0]

    def at(self, rows: NDArray[np.bool_] | Ints | slice) -> Stretches:
        """Some of them."""
        return Stretches(self.start_ns[rows], self.end_ns[rows], self.value[rows])


def stretches(rows: Frame, column: str) -> Stretches:
    """The samples of one device that tell ``column`` and the time that it is the mean of."""
    values, start, end = rows[column], rows["start_ns"], rows["time_ns"]
    usable = ~np.isnan(values) & (start != UNKNOWN) & (start < end)
    order = np.flatnonzero(usable)[np.argsort(end[usable], kind="stable")]
    found = Stretches(start[order], end[order], values[order].astype(np.float64))
    # A damaged capture may have samples that overlap; each instant counts once.
    clear = np.ones(len(order), bool)
    clear[1:] = found.start_ns[1:] >= np.maximum.accumulate(found.end_ns)[:-1]
    return found.at(clear)


def means_by_kind(
    samples: Stretches, parts: Floats, signed: bool = False
) -> tuple[Interval, ...] | None:
    """The mean value while each kind of work ran; None where the samples cannot tell.

    Least squares weighted by length: the value of a stretch is the sum over kinds of its part in
    that stretch times the kind's mean. Intervals are of 90 %, by a block bootstrap over samples.

    Args:
        samples: n stretches.
        parts: shape (n, kinds): time of each kind as a share of the stretch.
        signed: whether a mean may be negative (of a difference).
    """
    n, kinds = parts.shape
    if n < 2 or np.linalg.matrix_rank(parts) < kinds:
        return None
    weight = samples.length_ns / samples.length_ns.mean()
    weighted = parts * weight[:, None]
    # The normal equations are sums over samples, so a draw is a product with its counts.
    squares = in_blocks(np.einsum("ni,nj->nij", weighted, parts).reshape(n, -1))
    products = in_blocks(weighted * samples.value[:, None])
    counts = draws(len(squares))
    left = (counts @ squares).reshape(-1, kinds, kinds)
    right = (counts @ products)[:, :, None]
    solved = (np.linalg.pinv(left, hermitian=True) @ right)[:, :, 0]
    if not signed:
        solved = np.maximum(solved, 0.0)
    low, high = np.quantile(solved[1:], [0.05, 0.95], axis=0)
    there = (parts > 0).sum(axis=0)
    return tuple(
        Interval(
            float(solved[0, k]),
            float(min(low[k], solved[0, k])),
            float(max(high[k], solved[0, k])),
            int(there[k]),
        )
        for k in range(kinds)
    )


def scaled(value: Interval, factor: float) -> Interval:
    """A mean in another unit, such as a share of a limit."""
    return Interval(value.mid * factor, value.low * factor, value.high * factor, value.n)


def within(share: Interval) -> Interval:
    """A share that is not below 0 nor above 1."""
    low, mid, high = (min(max(value, 0.0), 1.0) for value in (share.low, share.mid, share.high))
    return Interval(mid, low, high, share.n)


def in_blocks(values: Floats) -> Floats:
    """Sums over blocks of neighbouring samples, along the first axis; few have shorter blocks."""
    size = min(BLOCK, max(1, len(values) // 4))
    found: Floats = np.add.reduceat(values, np.arange(0, len(values), size))
    return found


def draws(blocks: int) -> Floats:
    """How often each block is in each of ``DRAWS`` draws, after a first row of ones.

    Shape (1 + DRAWS, blocks). Seeded, so that a report repeats itself.
    """
    picked = np.random.default_rng(blocks).integers(0, blocks, (DRAWS, blocks))
    drawn = [np.bincount(row, minlength=blocks) for row in picked]
    return np.vstack([np.ones(blocks), *drawn])
