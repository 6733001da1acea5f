"""Samples that can be true: a driver answers nonsense now and then, a file may be damaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.model import Frame, GpuFacts
from kvprobe.schema import GPU, UNKNOWN

_MOST = {"1": 1.5, "B/s": 1e14, "Hz": 1e12, "W": 1e5}
"""By unit. A share is a little above 1 now and then; 1e14 B/s is far above any memory."""
_BEYOND_NS = 10_000_000_000
"""How far a row may reach out of the recording: a sample of before it, a last slow call."""


def sensible(rows: Frame, window_ns: tuple[int, int]) -> tuple[Frame, int]:
    """The rows with what cannot be true made unknown, and how many values that were.

    Shares are not above 1 in what comes back. A row whose times make no sense is left out.
    """
    start, end = rows["start_ns"], rows["time_ns"]
    first, last = window_ns[0] - _BEYOND_NS, window_ns[1] + _BEYOND_NS
    timed = (end >= first) & (end <= last)
    timed &= (start == UNKNOWN) | ((start >= first) & (start < end))
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


def sensible_facts(facts: GpuFacts) -> GpuFacts:
    """The device with figures that are not above 0 made unknown."""
    wrong: dict[str, Any] = {
        name: None
        for name, value in vars(facts).items()
        if name != "index" and type(value) in (int, float) and not value > 0
    }
    return replace(facts, **wrong) if wrong else facts
