"""What restores did to a GPU: the time it idled while one was in flight, and the copies to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.correlator.gpu.ledger import RestoreCopy, Starvation
from kvprobe.correlator.gpu.stretches import Floats, Ints, Stretches, Windows, draws, in_blocks
from kvprobe.correlator.intervals import clip, intersection, length, union
from kvprobe.correlator.ledger import Account

SEEN_SHARE = 0.9
"""Of the time from the first to the last sample: less, and the bytes between are a guess."""


def in_flight(accounts: Sequence[Account], until_prefill: bool = False) -> Windows:
    """When at least one restore was in flight: first read to last read, hidden ones included.

    Args:
        accounts: the requests.
        until_prefill: to the start of the request's prefill, where that is later.
    """
    spent = []
    for account in accounts:
        if account.restore is None or account.first_read_ns is None or not account.restore.bytes:
            continue
        start = max(account.first_read_ns, account.arrival_ns)
        end = start + account.restore.exposed_ns + account.restore.hidden_ns
        if until_prefill:
            end = max(end, account.prefill_start_ns or end)
        spent.append((start, end))
    starts, ends = np.array(spent, np.int64).reshape(-1, 2).T
    return union(starts, ends)


def idle_while_restoring(
    activity: Stretches, restoring: Windows, prefilling: Windows
) -> tuple[Floats, Floats, Floats]:
    """Of each sample the idle time while a restore was in flight: estimate, least, most.

    Of each sample it is known for how long the GPU was idle, for how long a restore was in flight,
    and when prefills ran. Both times need not meet: at least ``idle + restore - length`` of them
    does, at most the shorter one.

    Args:
        activity: share of time with a kernel running.
        restoring: when a restore was in flight.
        prefilling: when at least one prefill ran.
    """
    whole = activity.length_ns.astype(np.float64)
    busy = np.clip(activity.value, 0, 1) * whole
    idle = whole - busy
    restore = activity.overlap_ns(restoring)
    prefill = activity.overlap_ns(prefilling)
    both = activity.overlap_ns(intersection(*restoring, *prefilling))
    beside, alone = restore - both, whole - prefill
    # Work beyond the prefills is spread over the time outside them; what is missing of them is
    # idle time inside them.
    outside = np.divide(idle, alone, out=np.zeros_like(idle), where=alone > 0)
    inside = np.divide(prefill - busy, prefill, out=np.zeros_like(idle), where=prefill > 0)
    estimate = np.where(busy >= prefill, beside * outside, beside + both * inside)
    low, high = np.maximum(idle + restore - whole, 0), np.minimum(idle, restore)
    return np.clip(estimate, low, high), low, high


def starvation(
    activity: Stretches, accounts: Sequence[Account], restoring: Windows, prefilling: Windows
) -> Starvation | None:
    """How long a GPU idled while a restore was in flight; None without samples of its activity.

    Args:
        activity: share of time with a kernel running.
        accounts: the requests.
        restoring: when a restore of theirs was in flight.
        prefilling: when at least one prefill ran.
    """
    if not len(activity):
        return None
    estimate, low, high = idle_while_restoring(activity, restoring, prefilling)
    covered_ns = int(activity.length_ns.sum())
    busy = np.clip(activity.value, 0, 1) * activity.length_ns
    first, last = int(activity.start_ns[0]), int(activity.end_ns[-1])
    return Starvation(
        starved_ns=round(float(estimate.sum())),
        low_ns=round(float(low.sum())),
        high_ns=round(float(high.sum())),
        idle_ns=covered_ns - round(float(busy.sum())),
        restore_ns=int(activity.overlap_ns(restoring).sum()),
        covered_ns=covered_ns,
        restores=len(_restored(accounts, first, last)),
        n=len(activity),
    )


def restore_copy(
    received: Stretches, accounts: Sequence[Account], pcie_bytes_per_s: float | None
) -> RestoreCopy | None:
    """What came over PCIe during restores; None without restores or samples.

    Args:
        received: bytes a second to the GPU.
        accounts: the requests.
        pcie_bytes_per_s: the most that the link can carry one way.
    """
    if not len(received):
        return None
    low, high = int(received.start_ns[0]), int(received.end_ns[-1])
    inside = _restored(accounts, low, high)
    windows = clip(*in_flight(inside, until_prefill=True), low, high)
    covered = received.overlap_ns(windows)
    # Where PCIe is read for a moment a second, most of what came was not seen.
    seen = received.length_ns.sum() >= SEEN_SHARE * (high - low)
    if not inside or not covered.any() or not seen:
        return None
    size, low_size, high_size = _received(received, covered)
    window_ns = length(*windows)
    link = pcie_bytes_per_s * window_ns / 1e9 if pcie_bytes_per_s else None
    return RestoreCopy(
        received_bytes=size,
        low_bytes=low_size,
        high_bytes=high_size,
        restored_bytes=sum(a.restore.bytes for a in inside if a.restore),
        window_ns=window_ns,
        link_share=size / link if link else None,
        restores=len(inside),
        n=int((covered > 0).sum()),
    )


def _received(received: Stretches, covered: Ints) -> tuple[float, float, float]:
    """Bytes in the covered time: all of the samples that meet it, less what came beside it.

    A copy may come at any place of its restore, so that a sample half covered need not have half
    of it. What came beside is taken at the rate of the samples that meet no restore.
    """
    length_ns = received.length_ns
    meets = covered > 0
    sizes = received.value * length_ns / 1e9
    sums = in_blocks(
        np.stack(
            [
                np.where(meets, sizes, 0),
                np.where(meets, 0, sizes),
                np.where(meets, 0, length_ns) / 1e9,
                np.where(meets, length_ns - covered, 0) / 1e9,
            ],
            axis=1,
        )
    )
    inside, clear, clear_s, beside_s = (draws(len(sums)) @ sums).T
    rate = np.divide(clear, clear_s, out=np.zeros_like(clear), where=clear_s > 0)
    found = np.maximum(inside - rate * beside_s, 0)
    low, high = np.quantile(found[1:], [0.05, 0.95])
    size = float(found[0])
    return size, min(size, float(low)), max(size, float(high))


def _restored(accounts: Sequence[Account], low: int, high: int) -> list[Account]:
    """Requests whose restore began in ``[low, high)``."""
    return [
        a
        for a in accounts
        if a.restore and a.restore.bytes and a.first_read_ns and low <= a.first_read_ns < high
    ]
