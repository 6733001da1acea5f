"""The roofline of a prefill: the least time that its arithmetic and its bytes could take.

A prefill cannot be quicker than its operations over the peak of the tensor cores, nor than its
bytes over the peak of device memory (Williams, Waterman and Patterson 2009, "Roofline").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.correlator.gpu.ledger import Bound, PrefillGroup, Roofline
from kvprobe.correlator.gpu.prefilling import Prefills
from kvprobe.model import EngineFacts, GpuFacts


@dataclass(frozen=True)
class Ceiling:
    """What ``devices`` GPUs that share a model's work could do at most, together."""

    arithmetic: ModelArithmetic
    flops_per_s: float | None
    bytes_per_s: float | None

    def of(self, new: int, context: int, took_ns: float) -> Roofline:
        """One prefill of ``new`` tokens behind ``context`` tokens."""
        flops = self.arithmetic.prefill_flops(new, context)
        size = self.arithmetic.prefill_bytes(new, context)
        least, limit = None, None
        if self.flops_per_s and self.bytes_per_s and size is not None:
            compute, memory = flops / self.flops_per_s * 1e9, size / self.bytes_per_s * 1e9
            least, limit = max((compute, "compute"), (memory, "hbm"))
        share = least / took_ns if least is not None and took_ns > 0 else None
        return Roofline(flops, size, least, limit, share, Bound.UNKNOWN)


def ceiling(engine: EngineFacts | None, gpus: Sequence[GpuFacts]) -> Ceiling | None:
    """For the GPUs that computed the engine's prefills; None where its arithmetic is unknown.

    The peaks are those of the GPUs that the engine's model is divided over. A prefill that was
    only modelled, or done by the CPU, has no roofline on a GPU.
    """
    arithmetic = engine.arithmetic if engine else None
    if arithmetic is None or not gpus or (engine and engine.prefill in ("cpu", "modelled")):
        return None
    first, devices = gpus[0], arithmetic.devices
    flops = first.peak_flops_per_s
    if flops and arithmetic.item_bits == 8:
        flops *= 2  # tensor cores that know 8-bit types do twice as many of them
    alike = all(
        (g.peak_flops_per_s, g.peak_bytes_per_s) == (first.peak_flops_per_s, first.peak_bytes_per_s)
        for g in gpus
    )
    peak = first.peak_bytes_per_s
    return Ceiling(
        arithmetic,
        flops * devices if flops and alike else None,
        peak * devices if peak and alike else None,
    )


def rooflines(ran: Prefills, limit: Ceiling | None) -> list[Roofline]:
    """One for each prefill; without a ceiling only what was measured has a place."""
    if limit is None:
        return [Roofline(None, None, None, None, None, Bound.UNKNOWN)] * len(ran)
    return [
        limit.of(int(new), int(context), float(end - start))
        for new, context, start, end in zip(
            ran.new, ran.context, ran.start_ns, ran.end_ns, strict=True
        )
    ]


def of_group(
    group: PrefillGroup,
    mine: NDArray[np.bool_],
    each: Sequence[Roofline],
    limit: Ceiling | None,
) -> PrefillGroup:
    """The group with the sums over its prefills.

    ``moved_ratio`` takes what the devices moved as the group's share of their peak bandwidth.
    """
    own = [one for one, is_mine in zip(each, mine, strict=True) if is_mine]
    least = [one.least_ns for one in own if one.least_ns is not None]
    sizes = [one.bytes for one in own if one.bytes is not None]
    moved = None
    if group.shares.hbm and limit and limit.bytes_per_s and len(sizes) == len(own) and sum(sizes):
        moved = group.shares.hbm.mid * limit.bytes_per_s * group.prefill_ns / 1e9 / sum(sizes)
    whole = len(least) == len(own)
    return replace(group, roofline_ns=sum(least) if whole else None, moved_ratio=moved)
