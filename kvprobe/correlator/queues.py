"""What each queue and each device carried: commands, rate, depth over time, latency, share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.correlator import intervals
from kvprobe.correlator.commands import READ, WRITE
from kvprobe.correlator.ledger import Latency, Load, QueueAccount
from kvprobe.correlator.paths import distinct_pairs
from kvprobe.model import Frame

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEARLY_FULL = 0.9
"""Share of ``queue_size`` from which a queue counts as full: a tag is free only some microseconds
after its command is done, so that of 15 commands that fit, 14 is full."""


@dataclass(frozen=True)
class Depth:
    """Time at each depth: ``time_ns[d]`` in the window, ``waiting_ns[d]`` while restores waited."""

    time_ns: Floats
    waiting_ns: Floats

    @property
    def mean(self) -> float | None:
        """Weighted by time; None for a window of no length."""
        return _mean(self.time_ns)

    @property
    def waiting_mean(self) -> float | None:
        """Mean while restores waited; None where none did."""
        return _mean(self.waiting_ns)

    @property
    def p99(self) -> int | None:
        """The depth not exceeded in 99 % of the time."""
        total = float(self.time_ns.sum())
        if total <= 0:
            return None
        return int(np.searchsorted(np.cumsum(self.time_ns), 0.99 * total))

    @property
    def peak(self) -> int:
        """The highest."""
        return int(np.flatnonzero(self.time_ns).max(initial=0))

    def waiting_share(self, low: float, high: float = np.inf) -> float | None:
        """Share of the time in which restores waited with a depth from ``low`` to ``high``."""
        total = float(self.waiting_ns.sum())
        if total <= 0:
            return None
        level = np.arange(len(self.waiting_ns))
        return float(self.waiting_ns[(level >= low) & (level <= high)].sum()) / total


def _mean(time: Floats) -> float | None:
    total = float(time.sum())
    return float((np.arange(len(time)) * time).sum()) / total if total > 0 else None


def depth(start: Ints, end: Ints, window_ns: tuple[int, int], waiting: tuple[Ints, Ints]) -> Depth:
    """Commands in flight over the window.

    Args:
        start: set-up of each command; below 0 unknown, such commands are left out.
        end: completion of each command.
        window_ns: the time that counts.
        waiting: sorted, disjoint intervals in which restores waited.
    """
    known = (start >= 0) & (end >= start)
    low, high = window_ns
    starts, ends = intervals.clip(start[known], end[known], low, high)
    begin, stop, _, level = intervals.step_function(starts, ends, np.zeros(len(starts)))
    waits = intervals.clip(*waiting, low, high)
    below = intervals.covered_below
    waited = below(*waits, stop) - below(*waits, begin)
    time = np.bincount(level, stop - begin, 1).astype(float)
    waiting_time = np.bincount(level, waited, 1).astype(float)
    # Before the first and after the last command nothing is in flight.
    time[0] += max(0.0, high - low - time.sum())
    waiting_time[0] += max(0.0, float((waits[1] - waits[0]).sum()) - waiting_time.sum())
    return Depth(time, waiting_time)


def found_full_share(start: Ints, done: Ints, size: int) -> float | None:
    """Share of the commands with whose set-up a queue was full; None where no time is known.

    Who waited for a tag is set up when one is given back: the queue is full with it.
    """
    known = (start >= 0) & (done >= start)
    if not known.any():
        return None
    begun = np.searchsorted(np.sort(start[known]), start[known], side="right")
    ended = np.searchsorted(np.sort(done[known]), start[known], side="right")
    return float((begun - ended >= NEARLY_FULL * size).mean())


def latency(start: Ints, done: Ints) -> Latency | None:
    """Quantiles of the commands that have both times; None without any."""
    known = (start >= 0) & (done >= start)
    if not known.any():
        return None
    mid, p95, p99 = np.quantile((done - start)[known], [0.5, 0.95, 0.99]).tolist()
    return Latency(mid, p95, p99, int(known.sum()))


def load(rows: Frame, over: Depth, window_ns: tuple[int, int], whole: tuple[int, int]) -> Load:
    """What these commands amount to.

    Args:
        rows: commands (see ``commands.commands``).
        over: their depth.
        window_ns: the time of the rate.
        whole: commands and bytes that the share is of.
    """
    reads, writes = rows["op"] == READ, rows["op"] == WRITE
    count, moved = len(rows["op"]), int(rows["bytes"][reads | writes].sum())
    part, total = (moved, whole[1]) if whole[1] else (count, whole[0])
    span = window_ns[1] - window_ns[0]
    answered = latency(rows["start_ns"], rows["done_ns"])
    return Load(
        commands=count,
        reads=int(reads.sum()),
        writes=int(writes.sum()),
        bytes=moved,
        share=part / total if total else None,
        rate_per_s=count / span * 1e9 if span > 0 else None,
        mean_depth=over.mean if answered else None,
        p99_depth=over.p99 if answered else None,
        peak_depth=over.peak if answered else None,
        latency=answered,
    )


def accounts(
    rows: Frame,
    window_ns: tuple[int, int],
    waiting: tuple[Ints, Ints],
    whole: tuple[int, int],
    size_of: Mapping[int, int | None],
) -> tuple[QueueAccount, ...]:
    """One account for each queue of a device, by controller and queue.

    Args:
        rows: the commands of the device.
        window_ns: the window.
        waiting: when restores waited.
        whole: commands and bytes of all paths of the head.
        size_of: commands that a queue of each controller (-1: the block layer's) can hold.
    """
    known = np.flatnonzero(rows["queue"] >= 0)
    pairs, place = distinct_pairs(rows["queue"][known], rows["controller"][known])
    order = np.argsort(place, kind="stable")
    edges = np.searchsorted(place[order], np.arange(len(pairs) + 1))
    found = []
    for i, (queue, controller) in enumerate(pairs.tolist()):
        mine = known[order[edges[i] : edges[i + 1]]]
        own = select(rows, mine)
        over = depth(own["start_ns"], own["done_ns"], window_ns, waiting)
        carried = load(own, over, window_ns, whole)
        account = QueueAccount(
            None if controller < 0 else controller, queue, carried, size_of.get(controller)
        )
        found.append(_while_waiting(account, over, own))
    return tuple(sorted(found, key=lambda q: (q.controller is None, q.controller or 0, q.queue)))


def _while_waiting(account: QueueAccount, over: Depth, rows: Frame) -> QueueAccount:
    if account.load.latency is None:
        return account
    size = account.queue_size
    return replace(
        account,
        waiting_depth=over.waiting_mean,
        idle_while_waiting_share=over.waiting_share(0, 0),
        full_while_waiting_share=over.waiting_share(NEARLY_FULL * size) if size else None,
        found_full_share=found_full_share(rows["start_ns"], rows["done_ns"], size)
        if size
        else None,
    )
