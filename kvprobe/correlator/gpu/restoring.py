"""What restores did to a GPU: the time it idled while one was in flight, and the copies to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvprobe.correlator.gpu.ledger import RestoreCopy, Starvation
from kvprobe.correlator.gpu.stretches import Stretches, Windows, means_by_kind
from kvprobe.correlator.intervals import clip, intersection, length, union
from kvprobe.correlator.ledger import Account


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


def starvation(
    activity: Stretches, accounts: Sequence[Account], prefilling: Windows
) -> Starvation | None:
    """How long a GPU idled while a restore was in flight; None without samples of its activity.

    Of each sample it is known for how long the GPU was idle, for how long a restore was in flight,
    and when prefills ran. Both times need not meet: at least ``idle + restore - length`` of them
    does, at most the shorter one.

    Args:
        activity: share of time with a kernel running.
        accounts: the requests.
        prefilling: when at least one prefill ran.
    """
    if not len(activity):
        return None
    restoring = in_flight(accounts)
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
    estimate = np.clip(estimate, low, high)
    first, last = int(activity.start_ns[0]), int(activity.end_ns[-1])
    return Starvation(
        starved_ns=round(float(estimate.sum())),
        low_ns=round(float(low.sum())),
        high_ns=round(float(high.sum())),
        idle_ns=round(float(idle.sum())),
        restore_ns=int(restore.sum()),
        covered_ns=int(activity.length_ns.sum()),
        restores=len(_restored(accounts, first, last)),
        n=len(activity),
    )


def restore_copy(
    received: Stretches, accounts: Sequence[Account], pcie_bytes_per_s: float | None
) -> RestoreCopy | None:
    """What came over PCIe during restores; None where the samples cannot tell.

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
    part = received.overlap_ns(windows) / received.length_ns
    found = means_by_kind(received, np.stack([part, 1 - part], axis=1))
    if found is None or not inside:
        return None
    seconds = length(*windows) / 1e9
    rate = found[0]
    return RestoreCopy(
        received_bytes=rate.mid * seconds,
        low_bytes=rate.low * seconds,
        high_bytes=rate.high * seconds,
        restored_bytes=sum(a.restore.bytes for a in inside if a.restore),
        window_ns=length(*windows),
        link_share=rate.mid / pcie_bytes_per_s if pcie_bytes_per_s else None,
        restores=len(inside),
        n=rate.n,
    )


def _restored(accounts: Sequence[Account], low: int, high: int) -> list[Account]:
    """Requests whose restore began in ``[low, high)``."""
    return [
        a
        for a in accounts
        if a.restore and a.restore.bytes and a.first_read_ns and low <= a.first_read_ns < high
    ]
