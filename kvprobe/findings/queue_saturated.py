"""More depth only adds latency: queues are full, or far beyond where storage gains by depth.

A full queue has no tag for the next command. Without a scheduler the request then waits before it
exists: its read is open and nothing shows below it; with one it waits in the block queue.
"""

from __future__ import annotations

import numpy as np

from kvprobe.correlator.ledger import Ledger, QueueAccount
from kvprobe.findings import Detector
from kvprobe.findings._depth import depth_of_reads
from kvprobe.findings._storage import (
    DEVICE_BOUND,
    FULL_SHARE,
    at_stake,
    device_share,
    full_queues,
    io_queue_evidence,
    kv_commands,
    restoring,
    rows_are_whole,
    storage_name,
)
from kvprobe.findings._weigh import MIN_REQUESTS, Restored, confidence, severity
from kvprobe.model import Evidence, Finding, ServiceCell

CERTAIN_FULL_SHARE = 0.5
BEYOND = 4.0
"""Reads open at once over the knee: at twice the knee a queue only smooths arrivals."""
CERTAIN_BEYOND = 16.0
MIN_DEPTH = 16.0
"""Reads open at once below which a queue is not deep, wherever the knee is."""
KNEE_SHARE = 0.9
"""Of the best measured rate: the knee is the smallest depth that gives it."""


def _detect(ledger: Ledger) -> list[Finding]:
    requests = restoring(ledger)
    if len(requests) < MIN_REQUESTS or not rows_are_whole(ledger):
        return []
    return _full(ledger, requests) or _beyond_the_knee(ledger, requests)


def _full(ledger: Ledger, requests: list[Restored]) -> list[Finding]:
    """Queues that held as many commands as they can."""
    full = full_queues(ledger)
    if not full:
        return []
    worst, share, size = max(full, key=lambda found: found[1])
    commands = sum(queue.load.commands for queue, *_ in full)
    evidence = [
        Evidence("queues that were full", len(full), "", _queue_count(ledger)),
        Evidence("share of the commands with which the worst one was full", share, "share",
                 worst.load.commands),
        Evidence("share of the waiting time in which it was", worst.full_while_waiting_share,
                 "share", worst.load.commands),
        Evidence("commands that a queue holds", size, "", len(full)),
        Evidence("highest depth of the worst one", worst.load.peak_depth, "", worst.load.commands),
        Evidence("its depth while restores waited, mean", worst.waiting_depth, "", commands),
        *_latency(worst),
        *io_queue_evidence(ledger),
    ]  # fmt: skip
    above, n = _wait_above(ledger)
    if above is not None:
        name = "share of the reads' time before their commands were set up"
        evidence.append(Evidence(name, above, "share", n))
    return [
        Finding(
            slug="queue_saturated",
            severity=severity(None if above is None else at_stake(requests, above)),
            confidence=confidence(len(requests), share, FULL_SHARE, CERTAIN_FULL_SHARE),
            subject=storage_name(ledger),
            evidence=tuple(evidence),
            would_disprove="a larger queue, or fewer reads in flight, with which reads wait as "
            "long as before",
        )
    ]


def _queue_count(ledger: Ledger) -> int:
    return sum(len(device.queues) for device in ledger.kv_devices)


def _latency(queue: QueueAccount) -> list[Evidence]:
    found = queue.load.latency
    if found is None:
        return []
    return [
        Evidence("latency of its commands, median", found.median_ns, "ns", found.n),
        Evidence("latency of its commands, p99", found.p99_ns, "ns", found.n),
    ]


def _wait_above(ledger: Ledger) -> tuple[float | None, int]:
    """Share of the reads' time that passed before their commands were set up; commands behind it.

    Each command counts with the whole of its read: of a read in pieces the last may wait longest.
    """
    rows, ops, block = kv_commands(ledger), ledger.ops, ledger.block
    if not rows:
        return None, 0
    joined = rows["block"] >= 0
    owner = block["owner"][rows["block"][joined]]
    start, op = rows["start_ns"][joined], np.maximum(owner, 0)
    known = (owner >= 0) & (start >= 0)
    if not known.any():
        return None, 0
    waited = np.maximum(start - ops["start_ns"][op], 0)[known]
    took = np.maximum(ops["end_ns"][op] - ops["start_ns"][op], 1)[known]
    return float(waited.sum() / took.sum()), int(known.sum())


def _beyond_the_knee(ledger: Ledger, requests: list[Restored]) -> list[Finding]:
    """Far more reads in flight than the measured rate gains by."""
    device = device_share(requests)
    depth, reads = depth_of_reads(ledger)
    cells = [c for c in ledger.kv_devices[0].surface if c.bytes_per_s > 0]
    if device is None or device < DEVICE_BOUND or depth is None or depth < MIN_DEPTH:
        return []
    knee, now = _knee(cells, depth)
    if knee is None or now is None or depth < BEYOND * knee.depth:
        return []
    if now.bytes_per_s > knee.bytes_per_s / KNEE_SHARE:
        return []
    evidence = (
        Evidence("reads open at once, mean while any is", depth, "", reads),
        Evidence("smallest depth with the same rate", knee.depth, "", knee.n),
        Evidence("rate at that depth", knee.bytes_per_s, "B/s", knee.n),
        Evidence("rate at the depth of now", now.bytes_per_s, "B/s", now.n),
    )
    return [
        Finding(
            slug="queue_saturated",
            severity="info",  # the rate is what it can be; who waits is a matter of order
            confidence=confidence(len(requests), depth / knee.depth, BEYOND, CERTAIN_BEYOND),
            subject=storage_name(ledger),
            evidence=evidence,
            would_disprove="a sweep in which the depth of now gives a higher rate than that depth",
        )
    ]


def _knee(cells: list[ServiceCell], depth: float) -> tuple[ServiceCell | None, ServiceCell | None]:
    """The shallowest cell with nearly the best rate, and the cell nearest to the depth of now."""
    if not cells:
        return None, None
    now = min(cells, key=lambda cell: abs(cell.depth - depth))
    same = [cell for cell in cells if cell.size_bytes == now.size_bytes]
    best = max(cell.bytes_per_s for cell in same)
    enough = [cell for cell in same if cell.bytes_per_s >= KNEE_SHARE * best]
    return min(enough, key=lambda cell: cell.depth), now


DETECTOR = Detector("queue_saturated", "more depth only adds latency", _detect)
