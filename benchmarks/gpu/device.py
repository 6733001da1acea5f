"""Whether the figures are true on a real device: PyTorch copies and multiplies, kvprobe samples.

A copy of a tensor far larger than any cache reads and writes each byte once, so bytes over time is
known from outside; the DRAM share that GPM tells must be that over the peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from kvprobe.capture.frames import frame_from_rows
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import GpuFacts
from kvprobe.schema import GPU, UNKNOWN
from kvprobe.sources.gpu import GpuSampler

COPY_BYTES = 4 << 30
MATRIX = 8192
TOLERANCE = 0.10
IDLE_SHARE = 0.02
PRODUCT_SHARE = 0.4
"""What a large product reaches on any of the known devices; beyond 1 the peak would be wrong."""
_SETTLE_NS = 300_000_000
"""Left out at both ends of a phase: clocks rise, and rows may span its edge."""


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Idle, copy, matrix product, idle: about a minute and a half.

    Raises:
        KvprobeError: no PyTorch, or no device (exit 3).
    """
    torch = _torch()
    seconds = 4.0 if quick else 20.0
    sampler = GpuSampler()
    sampler.start()
    facts = _first_device(sampler)
    phases: list[tuple[str, int, int, float]] = []
    works: dict[str, Callable[[float], float]] = {
        "idle": _idle,
        "copy": partial(_copy, torch),
        "matrix product": partial(_multiply, torch),
        "idle again": _idle,
    }
    for name, work in works.items():
        say(name)
        begin = time.monotonic_ns()
        per_s = work(seconds)
        phases.append((name, begin, time.monotonic_ns(), per_s))
        time.sleep(1.0)
    calls = sampler.sampling.calls
    frame = frame_from_rows(GPU, sampler.close())
    outcome = Outcome(
        {"device": facts.name, "peak_bytes_per_s": facts.peak_bytes_per_s, "seconds": seconds}
    )
    rows = [_phase(frame, facts, *phase) for phase in phases]
    outcome.tables += [_phase_table(rows), _call_table(calls)]
    outcome.aims += _aims(rows)
    return outcome


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise KvprobeError(
            "PyTorch is not installed", "pip install torch", ExitCode.UNSUPPORTED
        ) from error
    if not torch.cuda.is_available():
        raise KvprobeError("PyTorch sees no CUDA device", "kvprobe doctor", ExitCode.UNSUPPORTED)
    return torch


def _first_device(sampler: GpuSampler) -> GpuFacts:
    """The device that PyTorch uses first, as soon as the driver has told of it."""
    for _ in range(300):
        if gpus := sampler.sampling.gpus:
            return gpus[0]
        time.sleep(0.1)
    raise KvprobeError(
        f"no device is sampled: {sampler.sampling.why_none}",
        "kvprobe doctor",
        ExitCode.UNSUPPORTED,
    )


def _idle(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def _copy(torch: Any, seconds: float) -> float:
    """Bytes read and written a second."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _repeated(torch, lambda: target.copy_(source), seconds) * 2 * COPY_BYTES


def _multiply(torch: Any, seconds: float) -> float:
    """Floating point operations a second."""
    one = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    two, out = torch.randn_like(one), torch.empty_like(one)
    per_s = _repeated(torch, lambda: torch.matmul(one, two, out=out), seconds)
    return per_s * 2 * MATRIX**3


def _repeated(torch: Any, work: Callable[[], Any], seconds: float) -> float:
    """How often a second, kept busy without a gap: never more than 16 launches ahead."""
    done, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        for _ in range(16):
            work()
        torch.cuda.synchronize()
        done += 16
    return float(done / (time.monotonic() - begin))


def _phase(
    frame: Any, facts: GpuFacts, name: str, begin: int, end: int, per_s: float
) -> dict[str, Value]:
    """What was sampled inside a phase, weighted by time."""
    mine = (frame["gpu"] == facts.index) & (frame["instance"] == UNKNOWN)
    inside = mine & (frame["start_ns"] >= begin + _SETTLE_NS)
    inside &= (frame["time_ns"] <= end - _SETTLE_NS) & ~np.isnan(frame["dram_bandwidth_share"])
    weights = (frame["time_ns"] - frame["start_ns"])[inside]
    found: dict[str, Value] = {"phase": name, "n": int(inside.sum())}
    for column in ("dram_bandwidth_share", "sm_activity_share", "tensor_activity_share"):
        known = len(weights) and not np.isnan(frame[column][inside]).any()
        found[column] = float(np.average(frame[column][inside], weights=weights)) if known else None
    if name == "copy" and facts.peak_bytes_per_s:
        found["true_share"] = per_s / facts.peak_bytes_per_s
    if name == "matrix product":
        found["tflops"] = per_s / 1e12
        if facts.peak_flops_per_s:
            found["of_peak"] = per_s / facts.peak_flops_per_s
    return found


def _aims(rows: list[dict[str, Value]]) -> list[Aim]:
    copy = next(row for row in rows if row["phase"] == "copy")
    sampled, truth = copy["dram_bandwidth_share"], copy.get("true_share")
    ratio = None
    if isinstance(sampled, float) and isinstance(truth, float) and truth:
        ratio = sampled / truth
    idle = [row["dram_bandwidth_share"] for row in rows if str(row["phase"]).startswith("idle")]
    known = [share for share in idle if isinstance(share, float)]
    product = next(row for row in rows if row["phase"] == "matrix product").get("of_peak")
    return [
        Aim(
            f"DRAM share of a copy within {TOLERANCE:.0%} of bytes over time",
            "unknown" if ratio is None else f"{ratio:.3f} of the truth",
            None if ratio is None else abs(ratio - 1) <= TOLERANCE,
        ),
        Aim(
            f"DRAM share of an idle device below {IDLE_SHARE:.0%}",
            ", ".join(f"{share:.2%}" for share in known) or "unknown",
            max(known) < IDLE_SHARE if known else None,
        ),
        Aim(
            f"a matrix product reaches {PRODUCT_SHARE:.0%} of the peak operations, and never all",
            f"{product:.1%}" if isinstance(product, float) else "unknown",
            PRODUCT_SHARE <= product < 1 if isinstance(product, float) else None,
        ),
    ]


def _phase_table(rows: list[dict[str, Value]]) -> Table:
    return Table(
        "what was sampled",
        (
            Column("phase", "phase"),
            Column("dram_bandwidth_share", "DRAM, %", ".1f", 100),
            Column("true_share", "bytes/time, %", ".1f", 100),
            Column("sm_activity_share", "SM active, %", ".1f", 100),
            Column("tensor_activity_share", "tensor, %", ".1f", 100),
            Column("tflops", "TFLOP/s", ".0f"),
            Column("of_peak", "of peak, %", ".1f", 100),
            Column("n", "samples", ".0f"),
        ),
        tuple(rows),
    )


def _call_table(calls: Any) -> Table:
    return Table(
        "what a call costs",
        (
            Column("name", "call"),
            Column("calls", "calls", ".0f"),
            Column("mean_us", "mean us", ".0f"),
            Column("longest_us", "longest us", ".0f"),
            Column("cpu_us", "CPU us", ".0f"),
            Column("failed", "failed", ".0f"),
        ),
        tuple(
            {
                "name": call.name,
                "calls": call.calls,
                "mean_us": call.wall_ns / call.calls / 1e3,
                "longest_us": call.longest_ns / 1e3,
                "cpu_us": call.cpu_ns / call.calls / 1e3,
                "failed": call.failed,
            }
            for call in calls
        ),
    )
