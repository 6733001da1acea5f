"""Clocks that were held back while prefills ran, and whether those prefills took longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.cost_model import prefill_terms
from kvprobe.correlator.gpu.ledger import Throttling
from kvprobe.correlator.gpu.prefilling import Prefills
from kvprobe.correlator.gpu.stretches import Floats, Ints
from kvprobe.gpu_table import THROTTLING, ClockEvent
from kvprobe.model import Frame
from kvprobe.schema import UNKNOWN

NEAR_NS = 500_000_000
"""A reading tells of a clock or of a prefill no further away than this."""
MIN_PREFILLS = 5
"""Of either kind, for their medians to be compared."""


def throttling(
    rows: Frame, ran: Prefills, coefficients: tuple[float, float, float] | None
) -> Throttling | None:
    """What the readings of one GPU say of the time in which prefills ran; None without any.

    Args:
        rows: the samples of one GPU.
        ran: the prefills.
        coefficients: of the node's model of prefill seconds, see ``BreakEven``.
    """
    known = rows["clock_events"] != UNKNOWN
    order = np.argsort(rows["time_ns"][known], kind="stable")
    at, events = rows["time_ns"][known][order], rows["clock_events"][known][order]
    starts, ends = ran.windows
    during = np.zeros(len(at), bool)
    if len(starts):
        place = np.searchsorted(starts, at, side="right") - 1
        during = (place >= 0) & (at < ends[np.maximum(place, 0)])
    if not during.any():
        return None
    held = (events & int(THROTTLING)) != 0
    clocks, clock_held = _clocks(rows, at[during], held[during])
    slowdown, n_held, n_free = _slowdown(ran, at, held, coefficients)
    return Throttling(
        readings=int(during.sum()),
        held=int(held[during].sum()),
        reasons={
            str(event.name).lower(): count
            for event in ClockEvent
            if event & THROTTLING and (count := int(((events[during] & int(event)) != 0).sum()))
        },
        clock_held_hz=_median(clocks[clock_held]),
        clock_free_hz=_median(clocks[~clock_held]),
        slowdown=slowdown,
        prefills_held=n_held,
        prefills_free=n_free,
    )


def _clocks(rows: Frame, at: Ints, held: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.bool_]]:
    """Readings of the SM clock near one of the reasons, and whether that one held it back."""
    known = ~np.isnan(rows["sm_clock_hz"])
    clocks, times = rows["sm_clock_hz"][known], rows["time_ns"][known]
    nearest = _nearest(at, times)
    near = np.abs(at[nearest] - times) <= NEAR_NS
    return clocks[near], held[nearest[near]]


def _slowdown(
    ran: Prefills,
    at: Ints,
    held: NDArray[np.bool_],
    coefficients: tuple[float, float, float] | None,
) -> tuple[float | None, int, int]:
    """How much longer held prefills took, each over what the model says; and how many of each.

    A prefill is held if any reading in it is, or where none is in it the nearest one.
    """
    low, high = np.searchsorted(at, ran.start_ns), np.searchsorted(at, ran.end_ns)
    before = np.concatenate([[0], np.cumsum(held)])
    middle = (ran.start_ns + ran.end_ns) // 2
    nearest = _nearest(at, middle)
    told = (high > low) | (np.abs(at[nearest] - middle) <= NEAR_NS)
    was_held = np.where(high > low, before[high] > before[low], held[nearest])
    counts = int((told & was_held).sum()), int((told & ~was_held).sum())
    if coefficients is None or min(counts) < MIN_PREFILLS:
        return None, *counts
    expected = prefill_terms(ran.new.astype(float), ran.context.astype(float)) @ np.array(
        coefficients
    )
    ratio = (ran.end_ns - ran.start_ns) / 1e9 / np.maximum(expected, 1e-9)
    slow, free = _median(ratio[told & was_held]), _median(ratio[told & ~was_held])
    return slow / free if slow and free else None, *counts


def _nearest(times: Ints, to: Ints) -> Ints:
    """Places in the sorted ``times``, of which there is at least one."""
    right = np.clip(np.searchsorted(times, to), 0, len(times) - 1)
    left = np.maximum(right - 1, 0)
    return np.where(np.abs(times[left] - to) <= np.abs(times[right] - to), left, right)


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None
