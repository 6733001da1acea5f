"""What a capture says about itself, besides its tables: the typed form of ``manifest.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Filters,
    GpuSampling,
    Loss,
    Missing,
    NvmePath,
    ProgramCost,
)

FORMAT = "kvcap"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Clock:
    """Wall clock minus CLOCK_MONOTONIC, sampled before and after the window.

    ``uncertainty_ns`` is the half-width of a sample; ``steps`` counts the jumps of the wall clock
    that were seen in between, None where nobody looked.
    """

    before_ns: int
    after_ns: int | None = None
    uncertainty_ns: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Host:
    """The machine: enough to judge a figure, nothing that a reader could log in with."""

    hostname: str | None = None
    kernel: str | None = None
    machine: str | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    boot_id: str | None = None


@dataclass(frozen=True)
class OwnCost:
    """What recording cost: kernel programs, CPU time of this process over ``wall_ns``.

    ``programs`` were measured during ``measured_ns`` of that time only; None: all of it.
    """

    programs: tuple[ProgramCost, ...] = ()
    measured_ns: int | None = None
    agent_cpu_ns: int | None = None
    wall_ns: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The facts of one capture (or of the live window, which uses the same type).

    ``start_ns`` and ``end_ns`` are CLOCK_MONOTONIC; ``losses`` has a row per recorded table.
    """

    kvprobe: str
    capture_id: str
    start_ns: int
    end_ns: int
    clock: Clock
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    complete: bool = False
    redacted: bool = False
    redact_when_packed: bool = False
    """Asked for when recording began; rows on the disk keep their names until they are packed."""
    host: Host = Host()
    loader: str | None = None
    probes: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    filters: Filters = field(default_factory=Filters)
    losses: Mapping[str, Loss] = field(default_factory=dict)
    cost: OwnCost = OwnCost()
    budget_share: float | None = None
    """Share of a core for kvprobe per 100k block requests a second; None: no bound was set."""
    engine_name: str | None = None
    """The adapter chosen on the command line or seen in the signal; None: any recogniser."""
    engine: EngineFacts | None = None
    signal_understood: int | None = None
    signal_ignored: int | None = None
    devices: tuple[DeviceFacts, ...] = ()
    nvme_paths: tuple[NvmePath, ...] = ()
    """All that were there at some time of the recording."""
    gpu: GpuSampling | None = None
    """The NVIDIA devices and what sampling them has cost; None: recorded without looking."""
    notes: tuple[str, ...] = ()
    """What is missing or was cut short, one sentence each, for the first lines of a report."""

    @property
    def window_ns(self) -> tuple[int, int]:
        """Begin and end of the recording, CLOCK_MONOTONIC."""
        return self.start_ns, self.end_ns

    @property
    def start_wall_ns(self) -> int:
        """Begin of the recording in nanoseconds since the epoch."""
        return self.start_ns + self.clock.before_ns
