"""Storage was idle while requests queued; their restores began only when they were scheduled.

What an earlier start saves has two parts. The restore is hidden behind the wait; and where an
engine holds a slot while it restores, the slot is free sooner and the queue itself shrinks. With
queue ``q``, restore ``r`` and time in service ``v`` (from scheduled to first token, ``r`` in it),
the time before prefill falls from ``q + r`` to ``max(q', r)``, ``q'`` being the new queue:

- at least: ``q' = q``, and requests that wait together share the idle storage;
- expected: ``q' = q * (1 - r / v)``, the queue shrinks as the time in service does;
- at most: ``q' <= r``, nothing of the queue is left that could be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    Restored,
    confidence,
    engine_name,
    restored,
    severity,
)
from kvprobe.model import Evidence, Finding

MIN_WAIT_NS = 1_000_000
"""A scheduler step; a shorter wait is no queue."""
MIN_IDLE_SHARE = 0.5
"""Of its wait in the queue, for which storage had nothing to do."""
LATE_SHARE = 0.25
"""Share of restoring requests that began late from which it is a habit, not a burst."""
CERTAIN_LATE_SHARE = 0.75
MIN_GAIN_SHARE = 0.05
"""Of the time to first token: less than this an A B B A comparison would hardly show."""

AT_MOST = "share of time to first token an earlier start saves, at most"
EXPECTED = "share of time to first token an earlier start saves, expected"
AT_LEAST = "share of time to first token an earlier start saves, at least"


@dataclass(frozen=True)
class _Late:
    arrival_ns: int
    first_read_ns: int
    idle_ns: int
    queue_ns: int
    hidden_ns: int
    """The part of the exposed restore that fits into the idle wait."""
    expected_ns: float


def _detect(ledger: Ledger) -> list[Finding]:
    timed = [r for r in restored(ledger) if r.account.ttft_ns and _is_timed(r)]
    late = [found for r in timed if (found := _late(r)) is not None]
    n = len(timed)
    if n < MIN_REQUESTS or len(late) < LATE_SHARE * n:
        return []
    total = sum(r.account.ttft_ns or 0 for r in timed)
    hidden = sum(each.hidden_ns for each in late) / total
    expected = sum(each.expected_ns for each in late) / total
    most = sum(each.queue_ns for each in late) / total
    if hidden < MIN_GAIN_SHARE:
        return []
    waits = [each.first_read_ns - each.arrival_ns for each in late]
    idle = [each.idle_ns / wait for each, wait in zip(late, waits, strict=True)]
    count = len(late)
    return [
        Finding(
            slug="late_prefetch",
            severity=severity(expected),
            confidence=confidence(n, count / n, LATE_SHARE, CERTAIN_LATE_SHARE),
            subject=engine_name(ledger),
            evidence=(
                Evidence("share of restores that began late", count / n, "share", n),
                Evidence("wait before the first read, median", float(np.median(waits)), "ns", n),
                Evidence(
                    "share of that wait with storage idle, median",
                    float(np.median(idle)),
                    "share",
                    count,
                ),
                Evidence(AT_MOST, most, "share", count),
                Evidence(EXPECTED, expected, "share", count),
                Evidence(AT_LEAST, hidden * _alone_share(late), "share", count),
            ),
            would_disprove="first reads that begin before their requests are scheduled, or "
            "storage busy with other reads while requests queue",
        )
    ]


def _is_timed(request: Restored) -> bool:
    a = request.account
    return None not in (a.first_read_ns, a.scheduled_ns, a.device_before_read_ns)


def _late(request: Restored) -> _Late | None:
    a = request.account
    if a.first_read_ns is None or a.scheduled_ns is None or a.device_before_read_ns is None:
        return None
    queued = a.scheduled_ns - a.arrival_ns
    wait = a.first_read_ns - a.arrival_ns
    if queued < MIN_WAIT_NS or a.first_read_ns < a.scheduled_ns:
        return None
    if a.device_before_read_ns < MIN_IDLE_SHARE * wait:
        return None
    restore = request.restore.exposed_ns
    served = max((a.ttft_ns or 0) - queued, restore, 1)
    left = queued * (1 - restore / served)
    return _Late(
        arrival_ns=a.arrival_ns,
        first_read_ns=a.first_read_ns,
        idle_ns=a.device_before_read_ns,
        queue_ns=queued,
        # Until it is scheduled the engine could have read ahead; later it is restoring anyway.
        hidden_ns=min(queued, a.device_before_read_ns, restore),
        expected_ns=queued + restore - max(left, restore),
    )


def _alone_share(late: list[_Late]) -> float:
    """Time in which at least one late request waited over the sum of their waits.

    Requests that wait together would share the idle storage: at worst, each gets its part.
    """
    order = sorted(late, key=lambda each: each.arrival_ns)
    covered, reach = 0, order[0].arrival_ns
    for each in order:
        covered += max(0, each.first_read_ns - max(reach, each.arrival_ns))
        reach = max(reach, each.first_read_ns)
    return covered / sum(each.first_read_ns - each.arrival_ns for each in order)


DETECTOR = Detector("late_prefetch", "restores began only when requests were scheduled", _detect)
