"""Samples that can be true: a driver answers nonsense now and then, a file may be damaged."""

from __future__ import annotations

import numpy as np

from kvprobe.model import Frame
from kvprobe.schema import GPU, UNKNOWN

_MOST = {"1": 1.5, "B/s": 1e14, "Hz": 1e12, "W": 1e5}
"""By unit. A share is a little above 1 now and then; 1e14 B/s is far above any memory."""
_LONGEST_NS = 3_600_000_000_000


def sensible(rows: Frame) -> tuple[Frame, int]:
    """The rows with what cannot be true made unknown, and how many values that were.

    Shares are not above 1 in what comes back. A row whose times make no sense is left out.
    """
    start, end = rows["start_ns"], rows["time_ns"]
    length = end - start
    timed = (end >= 0) & (
        (start == UNKNOWN) | ((start >= 0) & (length > 0) & (length < _LONGEST_NS))
    )
    found = {name: column[timed] for name, column in rows.items()}
    wrong = int((~timed).sum())
    for column in GPU.columns:
        values = found[column.name]
        if column.dtype == "f8":
            with np.errstate(invalid="ignore"):
                bad = ~np.isnan(values) & ~((values >= 0) & (values <= _MOST[column.unit]))
            values = np.where(bad, np.nan, values)
            found[column.name] = np.minimum(values, 1.0) if column.unit == "1" else values
        elif column.name not in ("start_ns", "time_ns", "gpu", "instance"):
            bad = values < UNKNOWN
            found[column.name] = np.where(bad, UNKNOWN, values)
        else:
            continue
        wrong += int(bad.sum())
    return found, wrong
