"""Cut one request's time to first token into spans, and its restore into causes.

Both cuts are partitions: integer nanoseconds that sum to their whole without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import Restore, Spans

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Activity:
    """What one request did on storage: its lookups, its reads, the block rows under them.

    Arrays of int64. ``read_share`` is the share of each read that is this request's (below 1
    where reads were split between requests). ``queued_ns`` of a row that blk-throttle held back
    is the start of its operation: the wait began before the request existed.
    """

    lookup_start_ns: Ints
    lookup_end_ns: Ints
    read_start_ns: Ints
    read_end_ns: Ints
    read_bytes: Ints
    read_share: NDArray[np.float64]
    queued_ns: Ints
    issued_ns: Ints
    done_ns: Ints


def cut_ttft(
    arrival: int, prefill_start: int, prefill_end: int, first_token: int, activity: Activity
) -> Spans:
    """Cut ``[arrival, first_token)``; unknown milestones are negative.

    The milestones arrival, first lookup, last lookup before the first read, first read, last read,
    prefill start, prefill end and first token are taken in this order; each is clipped between its
    predecessor and the start of prefill, so a restore that runs into prefill ends there. What
    nothing explains is ``other_ns``: all after the last read (or lookup) when the start of
    prefill is unknown, and whatever lies between the end of prefill and the first token.
    """
    end = first_token
    known = prefill_start >= 0
    start = _clamp(prefill_start, arrival, end) if known else end
    finish = _clamp(prefill_end if prefill_end >= 0 else end, start, end)
    first_read, last_read = exposed(activity, arrival, prefill_start, first_token) or (start, start)
    reads = len(activity.read_start_ns) > 0
    looked = activity.lookup_start_ns < first_read
    lookup_start = lookup_end = first_read
    if looked.any():
        lookup_start = _clamp(int(activity.lookup_start_ns[looked].min()), arrival, first_read)
        lookup_end = _clamp(int(activity.lookup_end_ns[looked].max()), lookup_start, first_read)
    queue, waited = lookup_start - arrival, first_read - lookup_end
    other = 0 if known else start - last_read
    if not reads:
        # Nothing was restored: after the lookup the request waits for the scheduler again.
        queue += waited if known else 0
        other += 0 if known else waited
        waited = 0
    if not (reads or known or looked.any()):
        queue, other = 0, end - arrival  # nothing was seen at all
    return Spans(
        engine_queue_ns=queue,
        lookup_ns=lookup_end - lookup_start,
        lookup_to_read_ns=waited,
        restore_ns=last_read - first_read,
        read_to_prefill_ns=start - last_read if known else 0,
        prefill_ns=finish - start if known else 0,
        other_ns=other + (end - finish if known else 0),
    )


def exposed(
    activity: Activity, arrival: int, prefill_start: int, first_token: int
) -> tuple[int, int] | None:
    """First and last read before the request's own prefill (or first token); None without reads.

    Unknown milestones are negative. Both spans and restore are cut from these two.
    """
    if not len(activity.read_start_ns):
        return None
    first, last = int(activity.read_start_ns.min()), int(activity.read_end_ns.max())
    low = max(arrival, 0)
    high = max(first, last, low) if first_token < 0 else max(first_token, low)
    if prefill_start >= 0:
        high = _clamp(prefill_start, low, high)
    first = _clamp(first, low, high)
    return first, _clamp(last, first, high)


def cut_restore(
    activity: Activity,
    arrival: int,
    prefill_start: int,
    first_token: int,
    rows_left_out: bool = False,
) -> Restore | None:
    """Split the restore by cause, each instant to the first that applies.

    Device (or fabric) busy, in the block queue, in software (an operation is open with nothing
    outstanding below it), idle between operations. Only the part before the request's own prefill
    is split: the rest is hidden behind it. None when the request read nothing. Where block rows
    were left out on purpose, only idle time is known.
    """
    found = exposed(activity, arrival, prefill_start, first_token)
    if found is None:
        return None
    low, high = found
    first, last = int(activity.read_start_ns.min()), int(activity.read_end_ns.max())
    issued = np.where(activity.issued_ns >= 0, activity.issued_ns, activity.queued_ns)
    waiting = activity.queued_ns >= 0
    device, queue, software, idle = intervals.split_by_priority(
        [
            (issued[waiting], activity.done_ns[waiting]),
            (activity.queued_ns[waiting], activity.done_ns[waiting]),
            (activity.read_start_ns, activity.read_end_ns),
        ],
        low,
        high,
    )
    return Restore(
        bytes=round(float((activity.read_bytes * activity.read_share).sum())),
        ops=len(activity.read_start_ns),
        commands=len(activity.done_ns),
        exposed_ns=high - low,
        hidden_ns=max(last - max(high, first), 0),
        device_ns=None if rows_left_out else device,
        block_queue_ns=None if rows_left_out else queue,
        software_ns=None if rows_left_out else software,
        idle_ns=idle,
        effective_depth=intervals.mean_depth(activity.read_start_ns, activity.read_end_ns),
    )


def _clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)
