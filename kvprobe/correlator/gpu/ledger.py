"""What is said of each GPU of a window: the types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvprobe.model import GpuFacts, Interval


class Bound(StrEnum):
    """What a GPU was held up by."""

    HBM = "hbm_bound"
    COMPUTE = "compute_bound"
    PCIE = "pcie_bound"
    STARVED = "starved"
    """Most of the time no kernel ran, and for most of that a restore was in flight."""
    LATENCY = "latency_bound"
    """Work ran, and used none of them near its limit: small kernels, launches, gaps."""
    IDLE = "idle"
    """Most of the time no kernel ran, and for most of that no restore was in flight."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Shares:
    """How much of each limit was used; None is unknown.

    ``active``: time with a kernel. ``hbm``, ``compute`` (tensor cores) and ``pcie`` (to the GPU):
    of the most that could be. ``starved``: time without a kernel while a restore was in flight.
    """

    active: Interval | None = None
    hbm: Interval | None = None
    compute: Interval | None = None
    pcie: Interval | None = None
    starved: Interval | None = None


@dataclass(frozen=True)
class PrefillGroup:
    """Prefills of like size, ``tokens_low`` to ``tokens_high`` computed tokens each.

    ``prefill_ns`` is the sum of their times, an instant with several divided between them.
    ``roofline_ns`` is the least that their arithmetic could take on this hardware and
    ``moved_ratio`` the bytes that device memory moved over the fewest that must; None where the
    model's or the device's figures are unknown.
    """

    tokens_low: int
    tokens_high: int
    prefills: int
    prefill_ns: int
    samples: int
    shares: Shares
    bound: Bound
    why: str
    roofline_ns: float | None
    moved_ratio: float | None


@dataclass(frozen=True)
class Roofline:
    """What one prefill asked of the hardware, and the least time that this could take.

    ``flops`` and ``bytes`` are of all devices together, ``bytes`` as if it were computed alone.
    ``least_ns`` is the larger of both over the devices' peaks, ``limit`` which one that is
    (``compute`` or ``hbm``), ``share`` that time over the measured one. ``bound`` is what was
    measured: of the prefills of like size, as one alone is too short for the samples.
    """

    flops: int | None
    bytes: int | None
    least_ns: float | None
    limit: str | None
    share: float | None
    bound: Bound


@dataclass(frozen=True)
class BoundWindow:
    """A stretch of the window, at least a second, with ``samples`` in it.

    Its ``hbm`` and ``compute`` are shares while a kernel ran.
    """

    start_ns: int
    end_ns: int
    bound: Bound
    shares: Shares
    samples: int


@dataclass(frozen=True)
class Throttling:
    """Readings of the clocks while prefills ran: how many, and how many held back by what.

    ``clock_held_hz`` and ``clock_free_hz`` are medians of the SM clock beside readings with and
    without such a reason. ``slowdown`` is how much longer the prefills that met one took than the
    node's own model of them says, over the same of the others; medians, with the number of both.
    """

    readings: int
    held: int
    reasons: Mapping[str, int]
    clock_held_hz: float | None
    clock_free_hz: float | None
    slowdown: float | None
    prefills_held: int
    prefills_free: int


@dataclass(frozen=True)
class Starvation:
    """Time without a kernel while at least one restore was in flight, over ``covered_ns``.

    ``low_ns`` and ``high_ns`` hold whatever happened inside the ``n`` samples; ``starved_ns`` takes
    prefills as work of the GPU and other work as evenly spread over the rest of each sample.
    ``idle_ns`` and ``restore_ns`` are the two times that meet; ``restores`` were in flight.
    """

    starved_ns: int
    low_ns: int
    high_ns: int
    idle_ns: int
    restore_ns: int
    covered_ns: int
    restores: int
    n: int


@dataclass(frozen=True)
class RestoreCopy:
    """Bytes that came over PCIe to one GPU from the first read of a restore to its prefill.

    ``received_bytes`` is an estimate with its 90 % interval, all else that came in that time
    included; ``restored_bytes`` were read from storage for the same ``restores`` (for all GPUs of
    the engine). ``link_share`` is the mean rate in that time over what the link can carry.
    """

    received_bytes: float
    low_bytes: float
    high_bytes: float
    restored_bytes: int
    window_ns: int
    link_share: float | None
    restores: int
    n: int


@dataclass(frozen=True)
class Spread:
    """One metric over the window; ``n`` values stand behind it, ``covered_ns`` long in sum.

    ``covered_ns`` is None for readings of moments.
    """

    mean: float
    p95: float
    highest: float
    n: int
    covered_ns: int | None


@dataclass(frozen=True)
class HeldBack:
    """One clock event: for what share of ``n`` readings it was on."""

    reason: str
    share: float
    n: int


@dataclass(frozen=True)
class Xid:
    """One Xid error, which happened in the second before ``time_ns``."""

    time_ns: int
    number: int


@dataclass(frozen=True)
class GpuAccount:
    """One device, or one MIG GPU instance of it (``instance``).

    ``metrics`` goes by the columns of ``schema.GPU``. ``dram_bytes_per_s`` is the mean share of
    the peak that memory clock and bus width allow. ECC counts are those of the window.
    """

    facts: GpuFacts
    instance: int | None
    metrics: Mapping[str, Spread]
    dram_bytes_per_s: float | None
    clock_events: tuple[HeldBack, ...]
    ecc_corrected: int | None
    ecc_uncorrected: int | None
    xids: tuple[Xid, ...]
    follows_prefills: bool | None = None
    """Whether it works more while this engine's prefills run; None: the samples cannot tell."""
    starvation: Starvation | None = None
    restore_copy: RestoreCopy | None = None
    prefills: tuple[PrefillGroup, ...] = ()
    windows: tuple[BoundWindow, ...] = ()
    throttling: Throttling | None = None
    senseless_values: int = 0
    """Its values that could not be true and were left out."""
    why_no_prefills: str = ""
    """Why there is nothing about prefills although there were some."""
