"""Counters that only rise, but for a restart of what counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rises(values: NDArray[Any]) -> NDArray[Any]:
    """How far a counter rose to each reading from the one before; one that fell began again at 0.

    Args:
        values: shape (n,), readings in order of time. The result has shape (n - 1,).
    """
    steps = np.diff(values)
    return np.where(steps < 0, values[1:], steps)
