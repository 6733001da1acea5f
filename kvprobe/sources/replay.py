"""A capture as a source: its rows come again at the pace at which they were recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Frame,
    GpuSampling,
    Loss,
    NvmePath,
    ProgramCost,
)
from kvprobe.schema import TABLES
from kvprobe.sources import Batch, TableRows

Ints = NDArray[np.int64]

_DELIVERED_BY = {
    "block": ("done_ns",),
    "ops": ("end_ns",),
    "lookups": ("end_ns",),
    "nvme": ("done_ns",),
    "fabric": ("time_ns",),
    "depth": ("end_ns",),
    "histogram": ("end_ns",),
    "requests": ("arrival_ns", "scheduled_ns", "prefill_start_ns", "prefill_end_ns",
                 "first_token_ns"),
    "host": ("time_ns",),
    "gpu": ("time_ns",),
}  # fmt: skip
"""A live source has a row when the last of these has passed."""


class Facts(Protocol):
    """What a replay needs to know of a capture (a ``Manifest`` has it)."""

    @property
    def window_ns(self) -> tuple[int, int]:
        """Begin and end of the recording."""
        ...

    @property
    def engine(self) -> EngineFacts | None:
        """What the engine said of itself."""
        ...

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The block devices of the recorded host."""
        ...

    @property
    def nvme_paths(self) -> tuple[NvmePath, ...]:
        """The NVMe paths of the recorded host."""
        ...

    @property
    def gpu(self) -> GpuSampling | None:
        """The NVIDIA devices of the recorded host."""
        ...

    @property
    def losses(self) -> Mapping[str, Loss]:
        """How complete each table is."""
        ...

    @property
    def cost(self) -> Any:
        """Has ``programs``, what the BPF programs cost, and ``measured_ns``, in how long."""
        ...


class Recorded(Protocol):
    """What can be replayed; a ``Capture`` is one."""

    @property
    def manifest(self) -> Facts:
        """The facts."""
        ...

    def frame(self, name: str) -> Frame:
        """The rows of one table."""
        ...


class ReplaySource:
    """Satisfies ``kvprobe.sources.Source``.

    Args:
        recorded: the capture.
        speed: seconds of the recording per second of now; may be changed at any time, 0 halts.
        clock: nanoseconds that grow steadily.
    """

    def __init__(
        self,
        recorded: Recorded,
        speed: float = 1.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.speed = speed
        self._recorded = recorded
        self._clock = clock
        self._facts = recorded.manifest
        self._start_ns, self._end_ns = self._facts.window_ns
        self._now_ns = float(self._start_ns)
        self._last = clock()
        self._frames: dict[str, Frame] = {}
        self._times: dict[str, Ints] = {}
        self._place = dict.fromkeys(TABLES, 0)
        for name in TABLES:
            self._load(name)

    @property
    def engine(self) -> EngineFacts | None:
        """What the engine said of itself in the recording."""
        return self._facts.engine

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The block devices of the recorded host."""
        return self._facts.devices

    @property
    def nvme_paths(self) -> tuple[NvmePath, ...]:
        """The NVMe paths of the recorded host."""
        return self._facts.nvme_paths

    @property
    def gpu(self) -> GpuSampling | None:
        """The NVIDIA devices of the recorded host."""
        return self._facts.gpu

    @property
    def finished(self) -> bool:
        """Whether the end of the recording was delivered."""
        return all(self._place[name] == len(times) for name, times in self._times.items())

    def poll(self) -> Batch:
        """Rows between the last poll and now, in order of time; ``now_ns`` is recorded time."""
        tick = self._clock()
        self._now_ns += (tick - self._last) * self.speed
        self._last = tick
        return self._until(min(int(self._now_ns), self._end_ns))

    def losses(self) -> Mapping[str, Loss]:
        """Rows delivered so far; losses as of the whole recording."""
        return {
            name: Loss(self._place[name], loss.lost, loss.thinned)
            for name, loss in self._facts.losses.items()
            if name in TABLES
        }

    def cost(self) -> tuple[ProgramCost, ...]:
        """What the BPF programs cost in the whole recording."""
        return tuple(self._facts.cost.programs)

    @property
    def measured_ns(self) -> int | None:
        """For how long ``cost`` was measured."""
        measured: int | None = self._facts.cost.measured_ns
        return measured

    def close(self) -> Batch:
        """Stop here; the rows not yet delivered are given up."""
        self._place = {name: len(times) for name, times in self._times.items()}
        return Batch(min(int(self._now_ns), self._end_ns))

    def _load(self, name: str) -> None:
        frame = self._recorded.frame(name)
        times = self._delivery(name, frame)
        # Rows of a late second, or with no time at all, still come before the end.
        times = np.clip(times, self._start_ns, self._end_ns)
        order = np.argsort(times, kind="stable")
        self._times[name] = times[order]
        self._frames[name] = {column: values[order] for column, values in frame.items()}

    def _delivery(self, name: str, frame: Frame) -> Ints:
        """When a live source would have had each row; a key when its request arrived."""
        if name == "knobs":
            return np.full(len(frame["name"]), self._start_ns, dtype=np.int64)
        if name != "keys":
            times: Ints = np.maximum.reduce([frame[column] for column in _DELIVERED_BY[name]])
            return times
        requests = self._recorded.frame("requests")
        arrival = dict(zip(requests["id"], requests["arrival_ns"].tolist(), strict=True))
        return np.array([arrival.get(key, 0) for key in frame["request_id"]], dtype=np.int64)

    def _until(self, now_ns: int) -> Batch:
        tables: dict[str, TableRows] = {}
        for name, times in self._times.items():
            first = self._place[name]
            last = int(np.searchsorted(times, now_ns, side="right"))
            if last > first:
                tables[name] = {c: v[first:last] for c, v in self._frames[name].items()}
                self._place[name] = last
        return Batch(now_ns, tables)
