"""One path or one queue pair carries the load while the others have nothing to do.

The usual reasons, each of which is named where the facts show it: the ``numa`` policy of native
multipath uses one path for each node and keeps the others for the day it fails; a queue belongs to
the processors that submit, so that one thread uses one queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvprobe.capture.frames import select
from kvprobe.correlator.ledger import DeviceAccount, Ledger, QueueAccount
from kvprobe.findings import Detector
from kvprobe.findings._storage import (
    DEVICE_BOUND,
    MIN_COMMANDS,
    at_stake,
    depth_while,
    device_share,
    kv_commands,
    path_name,
    queue_name,
    restoring,
    rows_are_whole,
    storage_name,
)
from kvprobe.findings._weigh import MIN_REQUESTS, Restored, confidence, unmeasured_severity
from kvprobe.model import Evidence, Finding

BUSIEST_SHARE = 0.8
"""Of the bytes: with two, four times the load of the other."""
CERTAIN_SHARE = 0.98
MIN_DEPTH = 4.0
"""Commands in flight on the busiest while restores wait: with fewer there is little to share out,
and the others would not make restores shorter."""
USABLE = ("optimized", None)
"""ANA states of a path that I/O may use; the others stand by on purpose."""


@dataclass(frozen=True)
class _Side:
    """One of several ways: what it carried, and how deep it was while restores waited."""

    name: str
    commands: int
    share: float
    depth: float


def _detect(ledger: Ledger) -> list[Finding]:
    requests = restoring(ledger)
    device = device_share(requests)
    if len(requests) < MIN_REQUESTS or device is None or device < DEVICE_BOUND:
        return []
    if not rows_are_whole(ledger):
        return []
    return _among_paths(ledger, requests, device) or _among_queues(ledger, requests, device)


def _among_paths(ledger: Ledger, requests: list[Restored], device: float) -> list[Finding]:
    usable = [d for d in ledger.kv_devices if d.path and d.path.facts.ana_state in USABLE
              and d.path.facts.state in ("live", None)]  # fmt: skip
    if len(usable) < 2:
        return []
    rows = kv_commands(ledger)
    sides = []
    for each in usable:
        own = select(rows, rows["device"] == each.facts.device)
        depth = depth_while(ledger, own, ledger.waiting).waiting_mean or 0.0
        sides.append(_Side(path_name(each), len(own["op"]), _share(each), depth))
    policy = usable[0].path.facts.iopolicy if usable[0].path else None
    reason = [Evidence(f"usable paths, under the iopolicy {policy or 'unknown'}", len(usable), "",
                       len(usable))]  # fmt: skip
    disprove = "a run with another iopolicy, or both paths loaded alike, in which restores are "
    return _finding(ledger, requests, device, sides, len(usable), reason, disprove + "no shorter")


def _share(device: DeviceAccount) -> float:
    return (device.load.share or 0.0) if device.load else 0.0


def _among_queues(ledger: Ledger, requests: list[Restored], device: float) -> list[Finding]:
    """Queues of the busiest path; the others of a path may serve other processors."""
    busiest = max(ledger.kv_devices, key=_share)
    queues = [queue for queue in busiest.queues if queue.load.reads]
    count = _usable_queues(ledger, busiest, queues)
    if count < 2 or not queues:
        return []
    whole = sum(queue.load.bytes for queue in queues)
    sides = [
        _Side(
            f"{path_name(busiest)}: {queue_name(queue.controller, queue.queue)}",
            queue.load.commands,
            queue.load.bytes / whole if whole else 0.0,
            queue.waiting_depth or 0.0,
        )
        for queue in queues
    ]
    threads = len(np.unique(ledger.block["tid"][ledger.block["owner"] >= 0]))
    reason = [
        Evidence("queues that its processors could use", count, "", count),
        Evidence("threads that submitted reads", threads, "", sum(s.commands for s in sides)),
    ]
    disprove = "reads submitted on other processors that are answered no sooner"
    return _finding(ledger, requests, device, sides, count, reason, disprove)


def _usable_queues(ledger: Ledger, device: DeviceAccount, seen: list[QueueAccount]) -> int:
    """Queues that reads could use: those seen, or one for each processor up to those there are."""
    there = device.path.facts.io_queues if device.path else None
    return max(len(seen), min(there or 0, ledger.cpus or 0))


def _finding(
    ledger: Ledger,
    requests: list[Restored],
    device: float,
    sides: list[_Side],
    count: int,
    reason: list[Evidence],
    would_disprove: str,
) -> list[Finding]:
    """The finding that one of ``count`` ways carries the load, where it does."""
    busiest = max(sides, key=lambda side: side.share)
    if busiest.share < BUSIEST_SHARE or busiest.depth < MIN_DEPTH:
        return []
    if busiest.commands < MIN_COMMANDS:
        return []
    # The others could take over all but its part, as far as there is something in flight.
    gain = device * (1 - 1 / min(count, math.ceil(busiest.depth)))
    evidence = (
        Evidence("share of the bytes on the busiest", busiest.share, "share", busiest.commands),
        Evidence("its depth while restores waited, mean", busiest.depth, "", busiest.commands),
        *reason,
    )
    sure = confidence(busiest.commands, busiest.share, BUSIEST_SHARE, CERTAIN_SHARE)
    return [
        Finding(
            slug="queue_imbalance",
            severity=unmeasured_severity(at_stake(requests, gain)),
            # That the load is uneven is sure; that storage would be quicker otherwise is not.
            confidence=round(sure / 2, 3),
            subject=f"{storage_name(ledger)}: {busiest.name}",
            evidence=evidence,
            would_disprove=would_disprove,
        )
    ]


DETECTOR = Detector("queue_imbalance", "one path or queue carries the load, others idle", _detect)
