"""Keep kvprobe's own CPU time inside a budget by thinning block rows, never by silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BUDGET_SHARE = 0.01
"""Share of one core that the agent may use per ``BUDGET_REQUESTS`` requests a second."""
BUDGET_REQUESTS = 100_000
CALM_REQUESTS = 20_000
"""Requests a second below which nothing is thinned: rows then cost less than the polling."""
INTERVAL_NS = 1_000_000_000
MOST_THINNING = 1024


@dataclass(frozen=True)
class Thinning:
    """A change of ``keep_one_in`` and why it was made."""

    time_ns: int
    keep_one_in: int
    why: str


class Governor:
    """Doubles or halves the thinning of block rows once a second.

    Thinned more when rows were lost to a full ring, or the agent's CPU share exceeds the budget
    while there are many requests; less when the share has been under a quarter of the budget, or
    the requests few, for two intervals in a row.

    Args:
        apply: sets ``keep_one_in`` in the kernel.
        floor: the thinning asked for by the user, never gone below.
        budget_share: see ``BUDGET_SHARE``; below ``BUDGET_REQUESTS`` the share stays as it is.
    """

    def __init__(
        self, apply: Callable[[int], None], floor: int = 1, budget_share: float = BUDGET_SHARE
    ) -> None:
        self._apply = apply
        self._floor = floor
        self._budget_share = budget_share
        self._last: tuple[int, int, int, int] | None = None
        self._calm = 0
        self.keep_one_in = floor
        self.changes: list[Thinning] = []

    def is_due(self, now_ns: int) -> bool:
        """Whether an interval has passed since the last ``update``."""
        return self._last is None or now_ns - self._last[0] >= INTERVAL_NS

    def update(self, now_ns: int, cpu_ns: int, requests: int, lost: int) -> None:
        """Take running totals: the agent's CPU time, block requests seen, block rows lost."""
        last, self._last = self._last, (now_ns, cpu_ns, requests, lost)
        if last is None:
            return
        elapsed = max(1, now_ns - last[0])
        share = (cpu_ns - last[1]) / elapsed
        rate = (requests - last[2]) * 1e9 / elapsed
        budget = self._budget_share * max(1.0, rate / BUDGET_REQUESTS)
        if lost > last[3]:
            self._set(now_ns, self.keep_one_in * 2, f"{lost - last[3]} rows lost to a full ring")
        elif share > budget and rate >= CALM_REQUESTS:
            why = f"agent used {share:.2%} of a core, the budget is {budget:.2%}"
            self._set(now_ns, self.keep_one_in * 2, why)
        elif self.keep_one_in > self._floor and (share < budget / 4 or rate < CALM_REQUESTS):
            self._calm += 1
            if self._calm >= 2:
                why = f"agent used {share:.2%} of a core for {rate:.0f} requests a second"
                self._set(now_ns, self.keep_one_in // 2, why)
        else:
            self._calm = 0

    def _set(self, now_ns: int, keep_one_in: int, why: str) -> None:
        self._calm = 0
        keep_one_in = min(MOST_THINNING, max(self._floor, keep_one_in))
        if keep_one_in == self.keep_one_in:
            return
        self._apply(keep_one_in)
        self.keep_one_in = keep_one_in
        self.changes.append(Thinning(now_ns, keep_one_in, why))
