"""The recording loop: poll a source, keep what it gives, tell how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.recorder import Recorder
from kvprobe.clock import clock_step_ns, sample_clocks
from kvprobe.sources import POLL_SECONDS, Batch, Source

SEGMENT_NS = 1_000_000_000
_BUSY_ROWS = 50
_QUIET_SECONDS = 0.08
"""Waking up is most of what an idle recorder costs; a burst fits the rings for this long."""


def record(
    source: Source,
    recorder: Recorder,
    manifest: Manifest,
    stop: Callable[[int], bool],
    each_second: Callable[[Manifest], None] = lambda _: None,
) -> Manifest:
    """Record until ``stop`` says so, the source ends or the disk does; then close the source.

    Args:
        source: what to record.
        recorder: where to keep it; the caller calls its ``finish``.
        manifest: the facts at the start; ``start_ns`` is when recording began.
        stop: asked every few milliseconds with the monotonic time in nanoseconds.
        each_second: told the facts as of then.

    Returns:
        The facts at the end: window, losses, cost and engine. ``complete`` is not set.
    """
    began = _Began()
    wall = _WallClock()
    recorder.roll(manifest, manifest.start_ns)
    rolled_ns = manifest.start_ns
    pause = POLL_SECONDS
    try:
        while recorder.failure is None and not source.finished:
            batch = source.poll()
            recorder.add(batch)
            if batch.now_ns - rolled_ns >= SEGMENT_NS:
                now = _as_of(manifest, source, batch.now_ns, began, wall)
                recorder.roll(now, rolled_ns)
                rolled_ns = batch.now_ns
                each_second(now)
            if stop(batch.now_ns):
                break
            pause = _pause(pause, batch)
            time.sleep(pause)
    finally:
        batch = source.close()
        recorder.add(batch)
        final = _as_of(manifest, source, batch.now_ns, began, wall)
        recorder.roll(final, rolled_ns)
    return final


def _pause(last: float, batch: Batch) -> float:
    """Seconds until the next poll: short while rows come in numbers, longer when it is quiet."""
    if sum(map(len, batch.tables.values())) >= _BUSY_ROWS:
        return POLL_SECONDS
    return min(2 * last, _QUIET_SECONDS)


class _Began:
    """CPU and wall clock when recording began, both nanoseconds."""

    def __init__(self) -> None:
        self.cpu_ns = time.process_time_ns()
        self.wall_ns = time.monotonic_ns()


class _WallClock:
    """Watches for jumps of the wall clock, by which engines date their events."""

    def __init__(self) -> None:
        self._first = self._last = sample_clocks()
        self._steps_ns: list[int] = []

    def look(self) -> tuple[Clock, tuple[str, ...]]:
        """The clock facts as of now, and a note if it jumped."""
        now = sample_clocks()
        if step_ns := clock_step_ns(self._last, now):
            self._steps_ns.append(step_ns)
        self._last = now
        uncertainty_ns = max(self._first.uncertainty_ns, now.uncertainty_ns)
        clock = Clock(self._first.offset_ns, now.offset_ns, uncertainty_ns, len(self._steps_ns))
        return clock, tuple(
            f"the wall clock jumped by {step_ns / 1e9:+.6f} s during the recording"
            for step_ns in self._steps_ns
        )


def _as_of(
    manifest: Manifest, source: Source, now_ns: int, began: _Began, wall: _WallClock
) -> Manifest:
    clock, notes = wall.look()
    return replace(
        manifest,
        end_ns=now_ns,
        clock=clock,
        notes=(*manifest.notes, *notes),
        losses=dict(source.losses()),
        engine=source.engine or manifest.engine,
        devices=source.devices or manifest.devices,
        nvme_paths=source.nvme_paths or manifest.nvme_paths,
        gpu=source.gpu or manifest.gpu,
        cost=replace(
            manifest.cost,
            programs=source.cost(),
            measured_ns=source.measured_ns,
            agent_cpu_ns=time.process_time_ns() - began.cpu_ns,
            wall_ns=time.monotonic_ns() - began.wall_ns,
        ),
    )
