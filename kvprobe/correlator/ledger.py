"""The result of the join: one account per request, and what stands behind each figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Frame,
    Interval,
    Loss,
    RestoreSample,
    ServiceCell,
    Verdict,
)

CLASSES = ("exact", "thread", "window", "shared", "none")
"""Attribution classes, best first."""


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
    first_read_ns: int | None = None
    scheduled_ns: int | None = None
    prefill_start_ns: int | None = None
    device_before_read_ns: int | None = None
    """Time the storage device was idle between this request's arrival and its first read."""


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
class DeviceAccount:
    """One device over the window. Depth figures are of reads, from in-kernel sums."""

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

    earlier_requests: int = 0
    """Requests that ended before the window: left out."""

    def ops_of(self, account: int) -> NDArray[np.int64]:
        """Indices of the operations attributed to one account, by start time."""
        rows = np.flatnonzero(self.ops["request"] == account)
        return rows[np.argsort(self.ops["start_ns"][rows], kind="stable")]
