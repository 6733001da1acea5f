"""Synthetic ledgers: one healthy, and one ill in each way that a detector knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.correlator.ledger import (
    Account,
    BreakEven,
    DeviceAccount,
    Ledger,
    ReadAhead,
    Restore,
    Spans,
)
from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Frame,
    Interval,
    ServiceCell,
    Verdict,
)
from kvprobe.schema import OPS, OpKind

MS = 1_000_000
MIB = 1 << 20
N = 41
PREFILL_NS = 20 * MS
PERIOD_NS = 100 * MS
"""One arrival each period: far enough apart that requests do not meet."""


def restore(
    reads: int = 8,
    unit: int = MIB,
    depth: float | None = 4.0,
    device: int = 8 * MS,
    block_queue: int = MS,
    software: int = MS // 2,
    idle: int = MS // 2,
) -> Restore:
    return Restore(
        bytes=reads * unit,
        ops=reads,
        commands=reads,
        exposed_ns=device + block_queue + software + idle,
        hidden_ns=0,
        device_ns=device,
        block_queue_ns=block_queue,
        software_ns=software,
        idle_ns=idle,
        effective_depth=depth,
    )


def account(
    number: int,
    done: Restore | None,
    queued: int = MS // 2,
    gain: Interval | None = None,
    verdict: Verdict = Verdict.UNKNOWN,
) -> Account:
    arrival = 1_000 * MS + number * PERIOD_NS
    exposed = done.exposed_ns if done else 0
    ttft = queued + exposed + PREFILL_NS
    return Account(
        id=f"r{number}",
        arrival_ns=arrival,
        ttft_ns=ttft,
        prompt_tokens=4096,
        device_hit_tokens=0,
        storage_hit_tokens=2048 if done else 0,
        computed_tokens=2048 if done else 4096,
        stored_tokens=2048,
        spans=Spans(queued, 0, 0, exposed, 0, PREFILL_NS, 0),
        restore=done,
        recompute_ns=Interval(40 * MS, 35 * MS, 45 * MS, N),
        restore_estimate_ns=None,
        verdict=verdict,
        gain_ns=gain,
        attribution={"thread": 1.0} if done else {},
        first_read_ns=arrival + queued if done else None,
        scheduled_ns=arrival + queued,
        prefill_start_ns=arrival + queued + exposed,
        device_before_read_ns=queued if done else None,
    )


def reads(sizes: list[int], duration_ns: Callable[[int], int]) -> Frame:
    """A frame of KV reads, one after another."""
    took = np.array([duration_ns(size) for size in sizes], np.int64)
    starts = 1_000 * MS + np.concatenate([[0], np.cumsum(took)[:-1]]) if len(took) else took
    frame: Frame = {c.name: np.zeros(len(sizes), np.int64) for c in OPS.columns}
    frame["start_ns"], frame["end_ns"] = starts, starts + took
    frame["requested"] = frame["result"] = np.array(sizes, np.int64)
    frame["kind"] = np.full(len(sizes), OpKind.PREAD64, np.int64)
    frame["request"] = np.zeros(len(sizes), np.int64)
    return frame


def cell(size: int, depth: int, rate: float, source: str = "capture") -> ServiceCell:
    return ServiceCell(size, depth, True, rate, rate * 0.97, rate * 1.03, 7, source)


def device(mean_depth: float | None = 0.9, zero: float | None = 0.7) -> DeviceAccount:
    return DeviceAccount(
        facts=DeviceFacts(8 << 20, "nvme7n1", "pcie"),
        mean_depth=mean_depth,
        p99_depth=8,
        time_at_zero_share=zero,
        reads=997,
        read_bytes=997 * MIB,
        writes=0,
        write_bytes=0,
        read_latency_ns=None,
        little_ratio=None,
        little_n=0,
        surface=(),
    )


def ledger(accounts: list[Account], **changes: Any) -> Ledger:
    made = Ledger(
        window_ns=(1_000 * MS, 9_000 * MS),
        engine=EngineFacts(name="vllm", unit_tokens=256, unit_bytes=MIB, direct=True),
        accounts=tuple(accounts),
        break_even=BreakEven(None, (), None, 0, None, None, 0),
        devices=(device(),),
        restore=None,
        read_ahead=None,
        losses={},
        attributed_bytes={},
        ops=reads([], lambda size: size),
        block={},
    )
    return replace(made, **changes)


WON = Interval(25.0 * MS, 20.0 * MS, 30.0 * MS, N)
LOST = Interval(-15.0 * MS, -20.0 * MS, -10.0 * MS, N)


def healthy(n: int = N, **changes: Any) -> Ledger:
    """Four reads at once, most of the time in the device, restores that pay."""
    return ledger(
        [account(i, restore(), gain=WON, verdict=Verdict.RESTORE_WON) for i in range(n)], **changes
    )


def healthy_buffered(n: int = N) -> Ledger:
    """Buffered reads of files that are read once and to their end."""
    ahead = ReadAhead(n * 8 * MIB, n * 8 * MIB + 5 * 4096, 5 * 4096, n * 8, 0, 0)
    return healthy(n, read_ahead=ahead)


def one_large_unit(n: int = N) -> Ledger:
    """One read a restore: depth 1, but nothing is serial."""
    done = restore(reads=1, unit=32 * MIB, depth=1.0, device=30 * MS)
    return ledger(
        [account(i, done, gain=WON, verdict=Verdict.RESTORE_WON) for i in range(n)],
        devices=(device(0.3, 0.7),),
    )


def serial_restore(n: int = N) -> Ledger:
    done = restore(reads=16, depth=1.0, device=24 * MS, idle=4 * MS)
    return ledger(
        [account(i, done, gain=WON, verdict=Verdict.RESTORE_WON) for i in range(n)],
        devices=(device(0.32, 0.7),),
    )


def small_blocks(n: int = N) -> Ledger:
    """Eight reads at once of 16 KiB, each dearer above the block layer than below."""
    done = restore(reads=256, unit=16384, depth=8.0, device=4 * MS, software=9 * MS, idle=3 * MS)
    return ledger([account(i, done, gain=WON, verdict=Verdict.RESTORE_WON) for i in range(n)])


def late_prefetch(n: int = N) -> Ledger:
    return ledger(
        [
            account(i, restore(), queued=30 * MS, gain=WON, verdict=Verdict.RESTORE_WON)
            for i in range(n)
        ]
    )


def restore_loses(n: int = N) -> Ledger:
    def one(i: int) -> Account:
        lost = i % 3 == 0
        return account(
            i,
            restore(),
            gain=LOST if lost else WON,
            verdict=Verdict.RESTORE_LOST if lost else Verdict.RESTORE_WON,
        )

    return ledger([one(i) for i in range(n)])


def recompute_loses(n: int = N) -> Ledger:
    accounts = [
        account(i, None, gain=LOST, verdict=Verdict.RECOMPUTE_LOST)
        if i % 2
        else account(i, restore(), gain=WON, verdict=Verdict.RESTORE_WON)
        for i in range(2 * n)
    ]
    return ledger(accounts)


def readahead_waste(n: int = N) -> Ledger:
    asked = n * 8 * MIB
    return healthy(n, read_ahead=ReadAhead(asked, 2 * asked, asked, n * 8, 0, 0))


def page_cache_masks(n: int = N) -> Ledger:
    asked = n * 8 * MIB
    return healthy(n, read_ahead=ReadAhead(asked, asked // 4, 0, n * 8, n * 6, asked * 3 // 4))


HEALTHY = (healthy, healthy_buffered, one_large_unit)
ILL = (
    serial_restore,
    small_blocks,
    late_prefetch,
    restore_loses,
    recompute_loses,
    readahead_waste,
    page_cache_masks,
)
