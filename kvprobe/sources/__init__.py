"""Where rows come from: the running kernel and engine (``live``) or a capture (``replay``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Frame,
    GpuSampling,
    Loss,
    NvmePath,
    ProgramCost,
    Rows,
)

TableRows: TypeAlias = Rows | Frame | Sequence[Mapping[str, Any]]
"""Rows of one table: as the kernel wrote them, as a frame (replay), or as dicts (a signal)."""

POLL_SECONDS = 0.02
"""How often a source should be polled: a compromise between ring size and wakeups."""


@dataclass(frozen=True)
class Batch:
    """What arrived since the last poll. ``now_ns`` is CLOCK_MONOTONIC of the source."""

    now_ns: int
    tables: Mapping[str, TableRows] = field(default_factory=dict)


class Source(Protocol):
    """A stream of batches, with the facts that make them judgeable."""

    @property
    def engine(self) -> EngineFacts | None:
        """What the engine has said about itself so far."""
        ...

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The block devices of this source's host, all that were there at some time."""
        ...

    @property
    def nvme_paths(self) -> tuple[NvmePath, ...]:
        """The NVMe paths of this source's host, all that were there at some time."""
        ...

    @property
    def gpu(self) -> GpuSampling | None:
        """The NVIDIA devices of this source's host; None: nobody looked."""
        ...

    @property
    def finished(self) -> bool:
        """Whether no more rows will come; a live source never finishes by itself."""
        ...

    def poll(self) -> Batch:
        """Return what is new; never blocks."""
        ...

    def losses(self) -> Mapping[str, Loss]:
        """How complete each table is so far."""
        ...

    def cost(self) -> tuple[ProgramCost, ...]:
        """What the kernel side has cost so far, in the time that was measured."""
        ...

    @property
    def measured_ns(self) -> int | None:
        """For how long ``cost`` was measured; None: for the whole time."""
        ...

    def close(self) -> Batch:
        """Stop, and return the rest: rows in flight, requests that never finished."""
        ...
