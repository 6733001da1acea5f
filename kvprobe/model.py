"""The frozen types that layers hand to each other. Standard library and numpy only.

Times are integer nanoseconds of CLOCK_MONOTONIC, the clock of ``bpf_ktime_get_ns``; sizes are
bytes. Unknown is ``None`` here, ``-1`` in an analysis frame and null in a capture file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvprobe.arithmetic import ModelArithmetic

Rows: TypeAlias = NDArray[np.void]
"""Rows of one table as they leave the kernel: a structured array in ``schema`` order."""

Frame: TypeAlias = dict[str, NDArray[Any]]
"""A table for analysis: column -> int64 (-1 is unknown), float64 (nan) or object (str, None)."""


# ---------------------------------------------------------------- collection


@dataclass(frozen=True)
class Filters:
    """What the kernel keeps; everything else is dropped before a record is reserved.

    ``tgids`` includes descendants born later. ``device`` is the kernel's dev_t
    (major << 20 | minor); a native multipath disk stands for the hidden disks of its paths.
    ``root`` is an absolute directory. Empty means "all". ``min_latency_ns`` is for block rows only,
    ``keep_one_in`` for block rows and the NVMe commands of the same requests.
    """

    tgids: tuple[int, ...] = ()
    device: int | None = None
    root: str | None = None
    min_latency_ns: int = 0
    keep_one_in: int = 1


@dataclass(frozen=True)
class Loss:
    """How complete one table is: rows delivered, rows lost, rows thinned on purpose."""

    rows: int = 0
    lost: int = 0
    thinned: int = 0


@dataclass(frozen=True)
class ProgramCost:
    """What one BPF program cost: runs and net run time (the clock's own cost subtracted)."""

    name: str
    runs: int
    run_ns: int


@dataclass(frozen=True)
class Missing:
    """A hook, field or counter this machine does not have, and what that hides."""

    what: str
    why: str
    effect: str
    fix: str = ""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says about itself, once. ``unit`` is its smallest file or slot."""

    name: str
    model: str | None = None
    unit_tokens: int | None = None
    unit_bytes: int | None = None
    bytes_per_token: int | None = None
    reads_in_flight: int | None = None
    direct: bool | None = None
    root: str | None = None
    prefetch: bool | None = None
    prefill: str | None = None
    """How prefill was done: ``gpu``, ``cpu`` or ``modelled`` (a wait that follows a formula)."""
    arithmetic: ModelArithmetic | None = None


@dataclass(frozen=True)
class EngineSetting:
    """An engine-neutral knob in one engine's words. ``name`` None: that engine has no such knob."""

    name: str | None
    value: str | None
    how: str
    live: bool = False


@dataclass(frozen=True)
class DeviceFacts:
    """A block device as sysfs shows it; ``device`` is the kernel's dev_t."""

    device: int
    name: str
    transport: str
    size_bytes: int | None = None
    rotational: bool | None = None
    scheduler: str | None = None
    nr_requests: int | None = None
    read_ahead_bytes: int | None = None
    max_request_bytes: int | None = None
    logical_block_bytes: int | None = None
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class NvmePath:
    """One way to one NVMe namespace: a disk as block rows name it, and the controller behind it.

    ``device`` is the kernel's dev_t of that disk. Under native multipath it is hidden and ``head``
    is the disk that is mounted; otherwise ``head`` is its own name. ``queue_size`` is commands in
    flight for each of ``io_queues``. Names and numbers change when a controller reconnects;
    ``key`` does not.
    """

    device: int
    name: str
    head: str
    controller: int
    transport: str
    head_device: int | None = None
    nqn: str | None = None
    address: str | None = None
    nsid: int | None = None
    namespace: str | None = None
    """UUID, NGUID or EUI of the namespace, the first that is there."""
    state: str | None = None
    ana_state: str | None = None
    io_queues: int | None = None
    queue_size: int | None = None
    iopolicy: str | None = None
    numa_node: int | None = None

    @property
    def key(self) -> tuple[str | None, str | None, int | None]:
        """NQN, address and namespace id: what stays over a reconnect."""
        return self.nqn, self.address, self.nsid


@dataclass(frozen=True)
class GpuFacts:
    """An NVIDIA device as its driver describes it; ``index`` is the ``gpu`` column of its rows.

    ``peak_bytes_per_s`` is the most its memory could move, ``peak_flops_per_s`` the most dense
    16-bit operations of its tensor cores at the highest SM clock, ``pcie_bytes_per_s`` the most
    that its PCIe link could move each way; see ``kvprobe.sources.gpu.peaks``. ``mig`` says whether
    it is divided; ``instances`` are the ids of its MIG GPU instances.
    """

    index: int
    name: str
    uuid: str | None = None
    serial: str | None = None
    pci_address: str | None = None
    memory_bytes: int | None = None
    memory_bus_bits: int | None = None
    memory_clock_hz: int | None = None
    peak_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    compute_capability: str | None = None
    sm_clock_hz: int | None = None
    """The highest."""
    pcie_bytes_per_s: float | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    power_limit_watts: float | None = None
    mig: bool | None = None
    instances: tuple[int, ...] = ()
    gpm: bool | None = None
    """Whether the driver counts bandwidth and activity of this device (GPM, from Hopper on)."""
    not_sampled: tuple[Missing, ...] = ()


@dataclass(frozen=True)
class GpuCall:
    """What one kind of question to the driver has cost, over all devices.

    ``missed`` counts the periods in which a question was due and none was asked. ``interval_ns``
    is the longest that any device is asked at now: a slow answer is asked for less often.
    """

    name: str
    calls: int
    failed: int
    missed: int
    wall_ns: int
    longest_ns: int
    cpu_ns: int
    interval_ns: int


@dataclass(frozen=True)
class GpuSampling:
    """The GPU side of a recording: the devices, or why there are none, and what asking has cost.

    ``expected`` says whether there should have been devices: a machine without the driver's
    library has none, one whose driver refuses has.
    """

    gpus: tuple[GpuFacts, ...] = ()
    driver: str | None = None
    nvml: str | None = None
    why_none: str | None = None
    expected: bool = False
    calls: tuple[GpuCall, ...] = ()
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- analysis


@dataclass(frozen=True)
class Interval:
    """An estimate with its ``level`` interval and the number of samples behind it."""

    mid: float
    low: float
    high: float
    n: int
    level: float = 0.9


class Verdict(StrEnum):
    """Was the engine's choice for this request the cheaper one?"""

    RESTORE_WON = "restore_won"
    RESTORE_LOST = "restore_lost"
    RECOMPUTE_WON = "recompute_won"
    RECOMPUTE_LOST = "recompute_lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """One measured figure behind a finding; ``n`` samples stand behind it."""

    metric: str
    value: float | None
    unit: str
    n: int


@dataclass(frozen=True)
class Finding:
    """A symptom. The slug names its playbook; tuners list the slugs they answer."""

    slug: str
    severity: str
    """``info``, ``warning`` or ``critical``."""
    confidence: float
    subject: str
    evidence: tuple[Evidence, ...]
    would_disprove: str


@dataclass(frozen=True)
class Effect:
    """Expected change of a named metric; negative is a reduction. Interval at 90 %."""

    metric: str
    low: float
    mid: float
    high: float
    unit: str = "share"


@dataclass(frozen=True)
class Proposal:
    """One change to consider. ``needs`` names the measurement without which it is not proposed."""

    slug: str
    finding: str
    knob: str
    target: str
    current: int | str | None
    proposed: int | str | None
    unit: str
    reason: str
    effect: Effect | None = None
    risk: str = ""
    live: bool = False
    apply: str = ""
    undo: str = ""
    give_up: str = ""
    needs: str | None = None


@dataclass(frozen=True)
class ServiceCell:
    """One measured cell of the service surface T(size, depth).

    ``bytes_per_s`` is the rate of the whole device at that request size and depth, with its 90 %
    interval over ``n`` repeats (a sweep) or time slices (a capture).
    """

    size_bytes: int
    depth: int
    direct: bool
    bytes_per_s: float
    low_bytes_per_s: float
    high_bytes_per_s: float
    n: int
    source: str
    """``capture`` or ``sweep``."""


@dataclass(frozen=True)
class RestoreSample:
    """The restores of a capture in the four figures that a tuner scales."""

    n: int
    bytes: int
    ops: int
    restore_ns: int
    device_ns: int
    block_queue_ns: int
    software_ns: int
    idle_ns: int
    ttft_ns: int
    effective_depth: float
    restoring_at_once: float | None = None
    """Requests restoring at the same moment, as a restoring request sees it (itself included):
    the time-weighted mean over all restores. None: unknown, taken as 1."""


@dataclass(frozen=True)
class Facts:
    """All that a tuner may reason from; it does no I/O of its own.

    ``settings`` holds, per engine-neutral knob, how this engine says it.
    """

    engine: EngineFacts | None
    device: DeviceFacts | None
    restore: RestoreSample | None
    surface: tuple[ServiceCell, ...]
    settings: Mapping[str, Callable[[int], EngineSetting]] = field(default_factory=dict)
    break_even_tokens: Interval | None = None
    queue_ns_per_restore: Interval | None = None
    """How long restoring requests waited in the engine's queue before the first read."""
    recompute_ns_per_token: float | None = None
    """Marginal cost of prefilling one more token behind a typical restored prefix."""
    paths: tuple[NvmePath, ...] = ()
    """The NVMe paths that serve the KV cache; several under native multipath."""
    queue_entries: Mapping[int, int] = field(default_factory=dict)
    """Entries of an I/O queue of each controller, as ``nvme connect --queue-size`` has it. The
    driver keeps one or two of them for itself: ``NvmePath.queue_size`` is what is left."""


@dataclass(frozen=True)
class Tuner:
    """One tuner, exported as ``TUNER`` by its file: findings and facts in, proposals out."""

    name: str
    answers: tuple[str, ...]
    propose: Callable[[Sequence[Finding], Facts], list[Proposal]]
