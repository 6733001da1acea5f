"""A node with a GPU whose truth is known, tick by tick: requests, what ran, and the samples of it.

The truth is bitmaps of 0.1 ms; nothing here is what the correlator computes with. A sample is the
mean of the bitmap between two moments about 125 ms apart, as GPM has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import Account, BreakEven, Ledger, Restore, Spans
from kvprobe.model import EngineFacts, Frame, GpuFacts, GpuSampling, Interval, Verdict
from kvprobe.schema import GPU, UNKNOWN, ClockEvent

TICK_NS = 100_000
SAMPLE_NS = 125_000_000
LINK = 64e9
FACTS = GpuFacts(
    0, "H100", peak_bytes_per_s=3.35e12, peak_flops_per_s=989e12, pcie_bytes_per_s=LINK, gpm=True
)
BIG = {"hbm": 0.3, "compute": 0.85}
SMALL = {"hbm": 0.8, "compute": 0.2}
COLUMNS = {
    "active": "graphics_activity_share",
    "hbm": "dram_bandwidth_share",
    "compute": "tensor_activity_share",
    "pcie": "pcie_rx_bytes_per_s",
}


@dataclass
class Node:
    """``seconds`` of one GPU; ``bits`` by name of share, and where restores were in flight."""

    seconds: float
    seed: int = 0
    accounts: list[Account] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticks = round(self.seconds * 1e9 / TICK_NS)
        self.random = np.random.default_rng(self.seed)
        self.bits = {name: np.zeros(ticks) for name in COLUMNS}
        self.restoring = np.zeros(ticks, bool)
        self.prefilling = np.zeros(ticks, bool)
        self.copied = 0

    def request(
        self,
        at_ms: float,
        restore_ms: float = 0.0,
        prefill_ms: float = 80.0,
        new: int = 4096,
        shares: dict[str, float] | None = None,
        copy_bytes: int = 0,
        stretch: float = 1.0,
    ) -> float:
        """Arrives, restores, is prefilled; returns when that ends in ms.

        ``stretch`` makes the prefill take so much longer than its size says.
        """
        size = copy_bytes or 1_000_003
        begin = at_ms + restore_ms
        end = begin + prefill_ms * stretch
        span = self._ticks(at_ms, begin)
        self.restoring[span] = True
        if copy_bytes:
            # All at once, at the end of the restore: as fast as the link goes.
            took_ms = copy_bytes / LINK * 1e3
            part = self._ticks(begin - took_ms, begin)
            self.bits["pcie"][part] += copy_bytes / ((part.stop - part.start) * TICK_NS / 1e9)
            self.copied += copy_bytes
        run = self._ticks(begin, end)
        self.prefilling[run] = True
        self.bits["active"][run] = 1.0
        for name, share in (shares or BIG).items():
            self.bits[name][run] = share
        self._account(at_ms, begin, end, new, size if restore_ms else 0)
        return end

    def _account(self, at_ms: float, begin_ms: float, end_ms: float, new: int, size: int) -> None:
        arrival, begin, end = (round(each * 1e6) for each in (at_ms, begin_ms, end_ms))
        gap = begin - arrival
        restore = Restore(size, 1, 1, gap, 0, gap, 0, 0, 0, 1.0) if size else None
        self.accounts.append(
            Account(
                id=f"r{len(self.accounts)}", arrival_ns=arrival, ttft_ns=end - arrival,
                prompt_tokens=new, device_hit_tokens=0, storage_hit_tokens=0, computed_tokens=new,
                stored_tokens=None, spans=Spans(0, 0, 0, gap, 0, end - begin, 0), restore=restore,
                recompute_ns=None, restore_estimate_ns=None, verdict=Verdict.UNKNOWN, gain_ns=None,
                attribution={}, first_read_ns=arrival if size else None, prefill_start_ns=begin,
            )
        )  # fmt: skip

    def other_work(self, at_ms: float, ms: float, share: float = 0.5) -> None:
        """Something else that runs on the GPU: decode."""
        span = self._ticks(at_ms, at_ms + ms)
        self.bits["active"][span] = 1.0
        self.bits["hbm"][span] = np.maximum(self.bits["hbm"][span], share)

    def _ticks(self, from_ms: float, to_ms: float) -> slice:
        return slice(round(from_ms * 1e6 / TICK_NS), round(to_ms * 1e6 / TICK_NS))

    # ------------------------------------------------------------ what is seen of it

    def frame(self, gpu: int = 0) -> Frame:
        """Its rows of ``gpu``; samples come a little late now and then."""
        ticks = len(self.restoring)
        step = SAMPLE_NS // TICK_NS
        edges = np.arange(0, ticks, step) + self.random.integers(0, 40, -(-ticks // step))
        edges = edges[edges < ticks]
        rows: Frame = {}
        for column in GPU.columns:
            whole = column.dtype == "i8"
            empty = np.full(len(edges) - 1, UNKNOWN if whole else np.nan)
            rows[column.name] = empty.astype(np.int64 if whole else np.float64)
        rows["gpu"][:] = gpu
        rows["start_ns"][:], rows["time_ns"][:] = edges[:-1] * TICK_NS, edges[1:] * TICK_NS
        for name, column_name in COLUMNS.items():
            summed = np.concatenate([[0.0], np.cumsum(self.bits[name])])
            rows[column_name][:] = np.diff(summed[edges]) / np.diff(edges)
        self.covered = slice(int(edges[0]), int(edges[-1]))
        return rows

    def with_clocks(self, rows: Frame, held: NDArray[np.bool_], hz: tuple[float, float]) -> Frame:
        """The same with readings of the clock; ``held`` by tick, ``hz`` when held and when free."""
        at = np.arange(50, len(held), 2500)
        more = {name: np.repeat(column[:1], len(at)) for name, column in rows.items()}
        for name, column in more.items():
            if name != "gpu":
                column[:] = UNKNOWN if column.dtype.kind == "i" else np.nan
        more["time_ns"] = at * TICK_NS
        more["clock_events"] = np.where(held[at], int(ClockEvent.HW_THERMAL_SLOWDOWN), 0)
        more["sm_clock_hz"] = np.where(held[at], *hz)
        return {name: np.concatenate([column, more[name]]) for name, column in rows.items()}

    @property
    def idle(self) -> NDArray[np.bool_]:
        """No kernel runs, by tick."""
        idle: NDArray[np.bool_] = self.bits["active"] == 0
        return idle

    def starved_ns(self) -> int:
        """The truth over the time that the samples cover."""
        both = self.idle & self.restoring
        return int(both[self.covered].sum()) * TICK_NS

    def ledger(self, engine: EngineFacts | None = None, coefficients: object = None) -> Ledger:
        even = BreakEven(None, (), coefficients, 0, None, None, 0)  # type: ignore[arg-type]
        return Ledger(
            (0, round(self.seconds * 1e9)), engine, tuple(self.accounts), even, (), None, None, {},
            {}, {}, {},
        )  # fmt: skip


def sampling(*gpus: GpuFacts) -> GpuSampling:
    return GpuSampling(gpus or (FACTS,))


def holds(share: Interval | None, truth: float, slack: float = 0.02) -> bool:
    """Whether an interval holds the truth, or nearly."""
    return share is not None and share.low - slack <= truth <= share.high + slack
