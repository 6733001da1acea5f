"""Storage has next to nothing to do while requests wait for it, or only one queue to do it in.

Two causes, either of which is reported. The commands in flight are far below what storage needs to
reach its rate, although requests wait: and not because each reads one unit after another, which is
``serial_restore``. Or the controllers have one I/O queue each, so that one connection and one
processor carry what several could.
"""

from __future__ import annotations

from kvprobe.correlator import storage
from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._depth import (
    BUSY_DEPTH,
    MIN_READS,
    MIN_SPEED_UP,
    SERIAL_BYTES_SHARE,
    SERIAL_DEPTH,
    UNWITNESSED,
    depth_of_reads,
    measured_speed_up,
    serial_share,
)
from kvprobe.findings._storage import (
    DEVICE_BOUND,
    MIN_COMMANDS,
    at_stake,
    depth_while,
    device_share,
    full_queues,
    io_queue_evidence,
    io_queues,
    kv_commands,
    restoring,
    rows_are_whole,
    storage_name,
)
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    Restored,
    confidence,
    severity,
    unmeasured_severity,
)
from kvprobe.model import Evidence, Finding

FAR_BELOW = 0.25
"""Of the depth at which storage is busy: at a quarter of it, it gives about a quarter."""
SEVERAL = 2.0
"""Requests that wait at once, from which they could be served side by side."""
MOST_HELD = 0.5
"""Share of the restores in the block queue from which something below the reads holds them."""
MOST_SOFTWARE = 0.5
"""Share of a restore with reads open and nothing below them from which software is the cause:
``small_blocks`` looks at that."""
HELD_BACK = 0.5
"""Commands in flight for each open read below which most reads do not reach the device."""
SPREADABLE_DEPTH = 2.0
"""Commands in flight on one queue from which a second queue had something to carry."""


def _detect(ledger: Ledger) -> list[Finding]:
    requests = [r for r in restoring(ledger) if r.restore.ops >= MIN_READS]
    rows = kv_commands(ledger)
    if len(requests) < MIN_REQUESTS or not rows or len(rows["op"]) < MIN_COMMANDS:
        return []
    waiting = storage.waiting([r.account for r in requests])
    waited = int((waiting[1] - waiting[0]).sum())
    over = depth_while(ledger, rows, waiting)
    depth, idle = over.waiting_mean, over.waiting_share(0, 0)
    if waited <= 0 or depth is None or idle is None or not rows_are_whole(ledger):
        return []
    at_once = sum(r.restore.exposed_ns for r in requests) / waited
    evidence = [
        Evidence("commands in flight while restores waited, mean", depth, "", len(rows["op"])),
        Evidence("share of that time with none in flight", idle, "share", len(requests)),
        Evidence("requests waiting for restores at once, mean", at_once, "", len(requests)),
        *io_queue_evidence(ledger),
    ]
    if _is_shallow(ledger, requests, depth, at_once):
        return _shallow(ledger, requests, depth, evidence)
    one = io_queues(ledger) == 1 and (ledger.cpus or 1) > 1
    # One queue that is full is too small before it is too few: ``queue_saturated`` says both.
    if one and depth >= SPREADABLE_DEPTH and not full_queues(ledger):
        return _one_queue(ledger, requests, depth, evidence)
    return []


def _is_shallow(ledger: Ledger, requests: list[Restored], depth: float, at_once: float) -> bool:
    """Whether storage has far too little to do, for another reason than serial reads."""
    if depth > FAR_BELOW * BUSY_DEPTH:
        return False
    software = [r.restore.software_ns for r in requests]
    exposed = sum(r.restore.exposed_ns for r in requests)
    if None in software or sum(part or 0 for part in software) >= MOST_SOFTWARE * exposed:
        return False
    serial = serial_share(requests) >= SERIAL_BYTES_SHARE
    return not serial or (at_once >= SEVERAL and _one_by_one(ledger, requests))


def _one_by_one(ledger: Ledger, requests: list[Restored]) -> bool:
    """Whether requests are not even served side by side: one reader for all, or held back below."""
    open_at_once, _ = depth_of_reads(ledger)
    held = sum(r.restore.block_queue_ns or 0 for r in requests)
    exposed = sum(r.restore.exposed_ns for r in requests)
    return (open_at_once is not None and open_at_once <= SERIAL_DEPTH) or (
        held >= MOST_HELD * exposed
    )


def _shallow(
    ledger: Ledger, requests: list[Restored], depth: float, evidence: list[Evidence]
) -> list[Finding]:
    speed_up, cells = measured_speed_up(ledger)
    if speed_up is not None and depth < HELD_BACK * _reads_open(requests):
        speed_up = None  # rates at more reads are those of what holds them back
    if speed_up is not None and speed_up < MIN_SPEED_UP:
        return []
    sure = confidence(len(requests), -depth, -FAR_BELOW * BUSY_DEPTH, 0.0)
    if speed_up is None:
        # Without a measured rate at more depth, the depth that storage needs is that of flash.
        sure *= UNWITNESSED
        evidence.append(Evidence("depth at which flash is busy", BUSY_DEPTH, "", len(requests)))
    else:
        evidence.append(Evidence("measured rate at more depth over now", speed_up, "x", cells))
    gain = 1 - 1 / speed_up if speed_up else 1 - depth / BUSY_DEPTH
    return [
        Finding(
            slug="queue_starved",
            severity=(severity if speed_up else unmeasured_severity)(at_stake(requests, gain)),
            confidence=round(sure, 3),
            subject=storage_name(ledger),
            evidence=tuple(evidence),
            would_disprove="a run with twice the reads in flight in which restores are no shorter",
        )
    ]


def _reads_open(requests: list[Restored]) -> float:
    """Reads that a restore keeps open, mean over the requests."""
    return sum(r.restore.effective_depth or 0.0 for r in requests) / len(requests)


def _one_queue(
    ledger: Ledger, requests: list[Restored], depth: float, evidence: list[Evidence]
) -> list[Finding]:
    device = device_share(requests)
    if device is None or device < DEVICE_BOUND:
        return []
    # What more queues give was not measured: half as sure, and no more than they could share.
    gain = device * (1 - 1 / min(ledger.cpus or 1, depth))
    sure = confidence(len(requests), depth, SPREADABLE_DEPTH, BUSY_DEPTH) * UNWITNESSED
    return [
        Finding(
            slug="queue_starved",
            severity=unmeasured_severity(at_stake(requests, gain)),
            confidence=round(sure, 3),
            subject=f"{storage_name(ledger)}: one I/O queue",
            evidence=tuple(evidence),
            would_disprove="a run after connecting with one I/O queue for each processor in which "
            "restores are no shorter",
        )
    ]


DETECTOR = Detector("queue_starved", "storage has little to do while requests wait", _detect)
