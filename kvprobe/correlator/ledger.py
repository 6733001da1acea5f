"""The result of the join: one account per request, and what stands behind each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.gds import GpuDirect
from kvprobe.correlator.gpu.ledger import GpuAccount, Roofline
from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Frame,
    Interval,
    Loss,
    Missing,
    NvmePath,
    RestoreSample,
    ServiceCell,
    Verdict,
)

CLASSES = ("exact", "thread", "window", "shared", "none")
"""Attribution classes, best first."""


def _nothing() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.empty(0, np.int64), np.empty(0, np.int64)


@dataclass(frozen=True)
class Spans:
    """Time to first token, cut into spans that sum to it exactly (integer nanoseconds)."""

    engine_queue_ns: int
    lookup_ns: int
    lookup_to_read_ns: int
    restore_ns: int
    read_to_prefill_ns: int
    prefill_ns: int
    other_ns: int


@dataclass(frozen=True)
class Restore:
    """One request's restore. ``device + block_queue + software + idle = exposed`` exactly.

    ``exposed_ns`` is the restore before the request's own prefill, ``hidden_ns`` the part that
    overlaps it. ``effective_depth`` is the mean number of its reads open while any was open. The
    first three parts are None where block rows were left out: their time cannot be told apart.
    """

    bytes: int
    ops: int
    commands: int
    exposed_ns: int
    hidden_ns: int
    device_ns: int | None
    block_queue_ns: int | None
    software_ns: int | None
    idle_ns: int
    effective_depth: float | None


@dataclass(frozen=True)
class Account:
    """One request in the ledger. Intervals are at 90 %; None is unknown."""

    id: str
    arrival_ns: int
    ttft_ns: int | None
    prompt_tokens: int | None
    device_hit_tokens: int | None
    storage_hit_tokens: int | None
    computed_tokens: int | None
    stored_tokens: int | None
    """Tokens that a lookup found in storage, restored or not."""
    spans: Spans | None
    restore: Restore | None
    recompute_ns: Interval | None
    """Cost of prefilling the tokens that storage held (restored, or found and not restored)."""
    restore_estimate_ns: Interval | None
    """Where the engine recomputed a stored prefix: what restoring it would have cost."""
    verdict: Verdict
    gain_ns: Interval | None
    """Time the engine's choice saved against the other choice; negative is regret."""
    attribution: Mapping[str, float]
    """Share of the request's restored bytes by class; sums to 1, or all zero with no bytes."""
    host_hit_tokens: int | None = None
    offload_hit_tokens: int | None = None
    """Where the engine only adds up what host memory and storage held."""
    uncertainty_ns: int | None = None
    """How far the engine's times of this request may be off; None: it does not say."""
    vague: bool = False
    """So far that there are no spans, no restore and no verdict: reads of others are among its."""
    first_read_ns: int | None = None
    scheduled_ns: int | None = None
    prefill_start_ns: int | None = None
    device_before_read_ns: int | None = None
    """Time the storage device was idle between this request's arrival and its first read."""
    prefill: Roofline | None = None
    """What its prefill asked of the GPUs; None: no GPU is known to have computed it."""


@dataclass(frozen=True)
class BreakEvenPoint:
    """Both routes at one prefix length."""

    tokens: int
    restore: Interval
    recompute: Interval


@dataclass(frozen=True)
class BreakEven:
    """Where restoring begins to pay. ``tokens`` None: no crossing inside what was measured."""

    tokens: Interval | None
    curve: tuple[BreakEvenPoint, ...]
    recompute_coefficients: tuple[float, float, float] | None
    """a (s), b (s per token), c (s per token squared) of a + b*new + c*new*(context + new/2)."""
    recompute_n: int
    recompute_error: float | None
    """Median relative error of held-out predictions."""
    restore_coefficients: tuple[float, float] | None
    """Fixed cost (s) and cost per byte (s/B) of a restore."""
    restore_n: int
    note: str = ""


@dataclass(frozen=True)
class Latency:
    """How long commands took, from set-up (or issue) to completion; ``n`` of them."""

    median_ns: float
    p95_ns: float
    p99_ns: float
    n: int


@dataclass(frozen=True)
class Load:
    """The commands of one queue or one device.

    ``bytes`` are those of reads and writes. ``share`` is of the bytes (of the commands where none
    has bytes) of all paths of the same head. Depth figures are weighted by time over the window,
    ``peak_depth`` is the highest; all None where no command has both of its times.
    """

    commands: int
    reads: int
    writes: int
    bytes: int
    share: float | None
    rate_per_s: float | None
    mean_depth: float | None
    p99_depth: int | None
    peak_depth: int | None
    latency: Latency | None


@dataclass(frozen=True)
class QueueAccount:
    """One queue pair of a controller; ``controller`` None: a hardware queue of the block layer.

    Three figures are of the time in which some request waited for its restore, None where none
    did: the mean depth, the share of it with no command in this queue, the share with the queue
    full (see ``queues.NEARLY_FULL``). ``found_full_share`` is of the commands: with whose set-up
    it was full.
    """

    controller: int | None
    queue: int
    load: Load
    queue_size: int | None
    waiting_depth: float | None = None
    idle_while_waiting_share: float | None = None
    full_while_waiting_share: float | None = None
    found_full_share: float | None = None


SEGMENTS = ("driver", "wire_and_target", "receive", "completion")
"""Where a command can be, in order: set-up to sent, to first sign of its answer, to the driver's
completion, to the block layer's."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the commands' time, from set-up to the block layer's completion.

    ``parts`` are neighbours of ``SEGMENTS``; several: the stamps between them are missing, and
    ``why_merged`` says why. ``share`` is of the summed time of the ``n`` commands that have all
    stamps that most of them have.
    """

    parts: tuple[str, ...]
    total_ns: int
    share: float
    median_ns: float
    p95_ns: float
    n: int
    why_merged: str = ""


@dataclass(frozen=True)
class PathEvents:
    """Rows of the ``fabric`` table that concern one path, by what they mean.

    ``congestion_events`` are the times a connection's congestion control left its open state for
    CWR, recovery or loss; ``receive_gaps`` the times a segment from the target was lost or
    overtaken. Events of a connection count for each namespace of its controller.
    """

    failovers: int
    path_losses: int
    retransmits: int
    receive_gaps: int
    congestion_events: int
    reconnects: int
    timeouts: int
    send_waits: int


@dataclass(frozen=True)
class PathAccount:
    """One way to a namespace. ``names`` are all that its disk had in the window, newest last.

    ``events`` None: the ``fabric`` table was not recorded. ``outages`` are the times in which its
    namespace did not use it, ``(from, to)`` in ns, ``to`` None: not back at the end of the window.
    The state in ``facts`` is that at the end, ``lost`` where all that is known is an outage.
    """

    facts: NvmePath
    names: tuple[str, ...]
    events: PathEvents | None
    outages: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class DeviceAccount:
    """One device over the window. Depth figures are of reads, from in-kernel sums.

    Under native multipath a device is a path, by its key (see ``NvmePath``): under several names
    and numbers it is one. ``queues``, ``load`` and ``segments`` are from rows of the table
    ``counted_from``, of which ``lost_share`` were lost or thinned.
    """

    facts: DeviceFacts
    mean_depth: float | None
    p99_depth: int | None
    time_at_zero_share: float | None
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    read_latency_ns: Interval | None
    """Median request latency with its 5th and 95th percentile."""
    little_ratio: float | None
    """Depth by Little's law from the rows over the measured depth; far from 1 is unseen I/O."""
    little_n: int
    surface: tuple[ServiceCell, ...]
    numbers: tuple[int, ...] = ()
    """Every dev_t it had in the window."""
    head: str | None = None
    """Of an NVMe path the disk that is mounted: its own name, or under native multipath another."""
    head_facts: DeviceFacts | None = None
    path: PathAccount | None = None
    load: Load | None = None
    queues: tuple[QueueAccount, ...] = ()
    segments: tuple[Segment, ...] = ()
    counted_from: str = "block"
    lost_share: float = 0.0


@dataclass(frozen=True)
class ReadAhead:
    """Buffered KV reads against what the device delivered for those files."""

    asked_bytes: int
    """Bytes that buffered reads returned."""
    device_bytes: int
    """Bytes the device read for the same files through the page cache."""
    unused_bytes: int
    """Of these, bytes in no range that any operation of the window asked for."""
    ops: int
    ops_without_device: int
    """Buffered reads that no device request served: page cache hits."""
    cached_bytes: int


@dataclass(frozen=True)
class EngineTotal:
    """One counter over the window: what ``engine`` counted and what kvprobe saw.

    ``seen`` None: kvprobe has nothing to compare. ``pages`` are those with news, first and last
    included.
    """

    engine: str
    name: str
    counted: int
    seen: int | None
    pages: int


@dataclass(frozen=True)
class Ledger:
    """Everything the correlator says about one window."""

    window_ns: tuple[int, int]
    engine: EngineFacts | None
    accounts: tuple[Account, ...]
    break_even: BreakEven
    devices: tuple[DeviceAccount, ...]
    restore: RestoreSample | None
    """Sum over requests that restored, or None when none did."""
    read_ahead: ReadAhead | None
    losses: Mapping[str, Loss]
    attributed_bytes: Mapping[str, int]
    """Bytes of KV reads by class, ``none`` included."""
    ops: Frame
    """KV operations with the columns of ``ops`` plus ``key`` (object), ``request`` (index into
    ``accounts``, -1) and ``class`` (index into CLASSES)."""
    block: Frame
    """Block rows with the columns of ``block`` plus ``owner`` (index into ``ops``, -1)."""

    outside_requests: int = 0
    """Requests that ended before the window or came after it: left out."""
    commands: Frame = field(default_factory=dict)
    """Commands with the columns that ``commands.commands`` describes; empty: none were joined."""
    fabric: Frame = field(default_factory=dict)
    host: Frame = field(default_factory=dict)
    knobs: Frame = field(default_factory=dict)
    waiting: tuple[NDArray[np.int64], NDArray[np.int64]] = field(default_factory=_nothing)
    """When at least one request waited for its restore: sorted, disjoint starts and ends."""
    cpus: int | None = None
    missing: tuple[Missing, ...] = ()
    totals: tuple[EngineTotal, ...] = ()
    gds: GpuDirect | None = None
    """None: nothing went through libcufile."""
    gpus: tuple[GpuAccount, ...] = ()

    @property
    def kv_devices(self) -> tuple[DeviceAccount, ...]:
        """The device that served most KV bytes, and the other paths of its head."""
        first = self.devices[:1]
        if not first or first[0].head is None:
            return first
        return tuple(device for device in self.devices if device.head == first[0].head)

    def ops_of(self, account: int) -> NDArray[np.int64]:
        """Indices of the operations attributed to one account, by start time."""
        rows = np.flatnonzero(self.ops["request"] == account)
        return rows[np.argsort(self.ops["start_ns"][rows], kind="stable")]
