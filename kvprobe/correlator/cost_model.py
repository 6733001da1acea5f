"""Cost models of this node: non-negative least squares with a conformal prediction interval.

Both routes are linear in known terms: recomputing is ``a + b*new + c*new*(context + new/2)``
(a launch, the linear layers, attention over what is already there), restoring is
``a + b*bytes``. Coefficients cannot be negative, so a fit cannot promise time back.

The interval comes from held-out errors, not from an assumption about noise: the model is fitted
ten times without one tenth of the samples, and the ratios measured/predicted of the held-out
samples give the quantiles (K-fold conformal prediction; Vovk 2015, Barber et al. 2021). Ratios,
because both costs scatter in proportion to their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvprobe.model import Interval

Floats = NDArray[np.float64]

MIN_SAMPLES = 20
"""With fewer, the 5 % and 95 % quantiles of held-out errors are the extremes themselves."""
FOLDS = 10
LEVEL = 0.9
REACH = 1.5
"""How far beyond the largest measured size a prediction is still given."""


@dataclass(frozen=True)
class CostModel:
    """A fitted cost; times in seconds. ``low_ratio`` and ``high_ratio`` bound measured/predicted.

    ``sizes`` is the range of the size (new tokens, bytes) that was measured; ``error`` the median
    relative error of held-out predictions.
    """

    coefficients: tuple[float, ...]
    low_ratio: float
    high_ratio: float
    sizes: tuple[float, float]
    n: int
    error: float

    def seconds(self, terms: Floats) -> float:
        """Predicted seconds for one row of terms (the design matrix's columns)."""
        return float(np.dot(terms, self.coefficients))

    def reaches(self, size: float) -> bool:
        """Whether ``size`` lies inside what was measured, with a little grace above."""
        return 0 <= size <= self.sizes[1] * REACH

    def interval_ns(self, seconds: float) -> Interval:
        """A predicted cost as an interval in nanoseconds."""
        ns = seconds * 1e9
        return Interval(ns, ns * self.low_ratio, ns * self.high_ratio, self.n, LEVEL)


def prefill_terms(new: Floats | float, context: Floats | float) -> Floats:
    """Design matrix of prefill: columns 1, new, new*(context + new/2); tokens."""
    new, context = np.asarray(new, float), np.asarray(context, float)
    return np.stack([np.ones_like(new), new, new * (context + new / 2)], axis=-1)


def restore_terms(size_bytes: Floats | float) -> Floats:
    """Design matrix of a restore: columns 1, bytes."""
    size = np.asarray(size_bytes, float)
    return np.stack([np.ones_like(size), size], axis=-1)


def fit(terms: Floats, seconds: Floats, sizes: Floats) -> CostModel | None:
    """Fit one model; None with fewer than ``MIN_SAMPLES`` usable samples.

    Args:
        terms: shape (n, k), see ``prefill_terms`` and ``restore_terms``.
        seconds: shape (n,), measured costs; samples that are not positive are left out.
        sizes: shape (n,), the size that limits how far predictions may go.
    """
    usable = (seconds > 0) & np.isfinite(seconds) & np.isfinite(terms).all(axis=1)
    terms, seconds, sizes = terms[usable], seconds[usable], sizes[usable]
    n = len(seconds)
    if n < MIN_SAMPLES:
        return None
    coefficients = _solve(terms, seconds)
    # A fixed shuffle: the same capture always gives the same report.
    fold = np.random.default_rng(n).permutation(n) % FOLDS
    predicted = np.empty(n)
    for k in range(FOLDS):
        held = fold == k
        predicted[held] = terms[held] @ _solve(terms[~held], seconds[~held])
    valid = predicted > 0
    if valid.sum() < MIN_SAMPLES:
        return None
    ratio = seconds[valid] / predicted[valid]
    low, high = _conformal(ratio)
    return CostModel(
        coefficients=tuple(coefficients.tolist()),
        low_ratio=low,
        high_ratio=high,
        sizes=(float(sizes.min()), float(sizes.max())),
        n=n,
        error=float(np.median(np.abs(1 / ratio - 1))),
    )


def _solve(terms: Floats, seconds: Floats) -> Floats:
    """Relative least squares (errors grow with cost), columns scaled for conditioning.

    A second pass weighs by the first fit instead of the noisy measurement itself, which would
    pull the fit below the middle; outlying stalls are bounded by Huber's weight.
    """
    weight = 1 / seconds
    solution = np.zeros(terms.shape[1])
    for _ in range(3):
        scale = np.maximum(np.abs(terms * weight[:, None]).max(axis=0), 1e-300)
        solution = nnls(terms * weight[:, None] / scale, seconds * weight)[0] / scale
        predicted = np.maximum(terms @ solution, np.median(seconds) * 1e-6)
        relative = np.abs(seconds / predicted - 1)
        bound = 2 * max(float(np.median(relative)), 1e-9)
        weight = np.sqrt(np.minimum(1, bound / np.maximum(relative, 1e-12))) / predicted
    return solution


def _conformal(ratio: Floats) -> tuple[float, float]:
    """Quantiles of held-out ratios at ranks that cover LEVEL of new samples."""
    n = len(ratio)
    ordered = np.sort(ratio)
    tail = (1 - LEVEL) / 2
    low = max(int(np.floor(tail * (n + 1))) - 1, 0)
    high = min(int(np.ceil((1 - tail) * (n + 1))) - 1, n - 1)
    # The prediction itself is always inside its interval.
    return min(float(ordered[low]), 1.0), max(float(ordered[high]), 1.0)
