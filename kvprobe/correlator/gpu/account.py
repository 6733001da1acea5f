"""What the GPUs did over the window: each metric's mean, 95th percentile and count, per device.

A GPM value is the mean over a stretch of time, so it weighs as long as that stretch; what is a
reading of a moment, or of a period that the driver chose, weighs the same each time. Shares of
time of clock events are shares of readings, which come at even intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.correlator.counters import rises
from kvprobe.correlator.gpu.ledger import GpuAccount, HeldBack, Spread, Xid
from kvprobe.correlator.gpu.sense import sensible, sensible_facts
from kvprobe.model import Frame, GpuFacts, GpuSampling
from kvprobe.schema import GPU, UNKNOWN, ClockEvent

Floats = NDArray[np.float64]


_METRICS = (*(c.name for c in GPU.columns if c.dtype == "f8"), "memory_used_bytes")


def gpu_accounts(
    frame: Frame, sampling: GpuSampling | None, window_ns: tuple[int, int]
) -> tuple[tuple[GpuAccount, Frame], ...]:
    """An account for each device, then for each of its MIG instances, with the rows behind it.

    Args:
        frame: the table ``gpu``.
        sampling: the devices; rows of a device that is not among them are left out.
        window_ns: begin and end of the recording.
    """
    found = []
    devices = {facts.index: sensible_facts(facts) for facts in (sampling.gpus if sampling else ())}
    for facts in devices.values():
        mine = frame["gpu"] == facts.index
        for instance in (UNKNOWN, *facts.instances):
            rows = select(frame, mine & (frame["instance"] == instance))
            rows, senseless = sensible(rows, window_ns)
            if instance == UNKNOWN or len(rows["time_ns"]):
                told = replace(_account(facts, instance, rows), senseless_values=senseless)
                found.append((told, rows))
    return tuple(found)


def _account(facts: GpuFacts, instance: int, rows: Frame) -> GpuAccount:
    metrics = dict(_spreads(rows))
    dram, peak = metrics.get("dram_bandwidth_share"), facts.peak_bytes_per_s
    # An instance has a part of the memory's channels, and which part is not told.
    whole = instance == UNKNOWN
    errors = rows["xid"] != UNKNOWN
    return GpuAccount(
        facts=facts,
        instance=None if whole else instance,
        metrics=metrics,
        dram_bytes_per_s=dram.mean * peak if dram and peak and whole else None,
        clock_events=tuple(_held_back(rows["clock_events"])),
        ecc_corrected=_grown(rows["ecc_corrected"]),
        ecc_uncorrected=_grown(rows["ecc_uncorrected"]),
        xids=tuple(
            Xid(int(at), int(number))
            for at, number in zip(rows["time_ns"][errors], rows["xid"][errors], strict=True)
        ),
    )


def _spreads(rows: Frame) -> Iterator[tuple[str, Spread]]:
    for name in _METRICS:
        values = rows[name]
        known = values != UNKNOWN if values.dtype.kind == "i" else ~np.isnan(values)
        if not known.any():
            continue
        values = values[known].astype(np.float64)
        start, end = rows["start_ns"][known], rows["time_ns"][known]
        spans = bool((start != UNKNOWN).all())
        weights = (end - start).astype(np.float64) if spans else np.ones(len(values))
        yield name, _spread(values, weights, int(weights.sum()) if spans else None)


def _spread(values: Floats, weights: Floats, covered_ns: int | None) -> Spread:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    at_p95 = int(np.searchsorted(passed, 0.95 * passed[-1]))
    mean = float(np.average(values, weights=weights)) if passed[-1] else float(values.mean())
    return Spread(mean, float(values[order][at_p95]), float(values.max()), len(values), covered_ns)


def _held_back(events: NDArray[Any]) -> Iterator[HeldBack]:
    events = events[events != UNKNOWN]
    for event in ClockEvent:
        share = float(np.mean((events & int(event)) != 0)) if len(events) else 0.0
        if share:
            yield HeldBack(str(event.name).lower(), share, len(events))
    if len(events) and not (events != 0).all():
        yield HeldBack("none", float(np.mean(events == 0)), len(events))


def _grown(counter: NDArray[Any]) -> int | None:
    """How far a counter rose; a driver that was loaded again begins at 0."""
    known = counter[counter != UNKNOWN]
    return int(rises(known).sum()) if len(known) else None
