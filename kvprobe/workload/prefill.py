"""The device that computes prompts: a wait that follows a cost model, or real BLAS work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kvprobe.errors import KvprobeError

DEFAULT_COST = "4,80,0.4"
"""a ms, b us, c ns: 12,500 tokens a second for short prompts, half of that near 200,000 tokens of
context; the order of one current accelerator with an 8 B model. State your own for others."""

_TILES, _TILE = 32, 64
"""A stack of small products: OpenBLAS does not spread those over threads of its own, which would
spin for each other whenever the processors are busy with something else."""


@dataclass(frozen=True)
class PrefillCost:
    """Prefill seconds = a + b*new + c*new*(context + new/2), all here in nanoseconds."""

    a_ns: float
    b_ns: float
    c_ns: float

    @classmethod
    def parse(cls, text: str) -> PrefillCost:
        """Read ``a_ms,b_us,c_ns``.

        Raises:
            KvprobeError: not three numbers that are not negative.
        """
        try:
            a_ms, b_us, c_ns = (float(part) for part in text.split(","))
            if min(a_ms, b_us, c_ns) < 0 or not np.isfinite([a_ms, b_us, c_ns]).all():
                raise ValueError
        except ValueError:
            raise KvprobeError(
                f"not a prefill cost: {text!r}", f"want a_ms,b_us,c_ns such as {DEFAULT_COST}"
            ) from None
        return cls(a_ms * 1e6, b_us * 1e3, c_ns)

    def ns(self, new: int, context: int) -> int:
        """Nanoseconds to compute ``new`` tokens behind ``context`` tokens that are there."""
        return round(self.a_ns + self.b_ns * new + self.c_ns * new * (context + new / 2))


class ModelledPrefill:
    """A wait: the accelerator is another device, and the host sleeps meanwhile."""

    label = "modelled"

    def __init__(self, cost: PrefillCost) -> None:
        """Follow ``cost``."""
        self._cost = cost

    def run(self, new: int, context: int) -> None:
        """Wait as long as computing ``new`` tokens behind ``context`` tokens takes."""
        end_ns = time.monotonic_ns() + self._cost.ns(new, context)
        while (left_ns := end_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)


class BlasPrefill:
    """Real matrix products, as many as take the modelled time on an idle processor."""

    label = "cpu"

    def __init__(self, cost: PrefillCost) -> None:
        """Measure how long one stack of products takes here (the best of several)."""
        self._cost = cost
        random = np.random.default_rng(0)
        self._left = random.random((_TILES, _TILE, _TILE), np.float32)
        self._right = random.random((_TILE, _TILE), np.float32)
        self._out = np.empty_like(self._left)
        times = []
        for _ in range(50):
            start_ns = time.perf_counter_ns()
            np.matmul(self._left, self._right, out=self._out)
            times.append(time.perf_counter_ns() - start_ns)
        self._tile_ns = max(1, min(times))

    def run(self, new: int, context: int) -> None:
        """Compute as much as would take that long."""
        for _ in range(max(1, self._cost.ns(new, context) // self._tile_ns)):
            np.matmul(self._left, self._right, out=self._out)


Prefill = ModelledPrefill | BlasPrefill


def make_prefill(kind: str, cost: PrefillCost) -> Prefill:
    """``model`` or ``blas``."""
    return ModelledPrefill(cost) if kind == "model" else BlasPrefill(cost)
