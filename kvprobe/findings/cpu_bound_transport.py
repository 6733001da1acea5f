"""The processor that receives for a queue is at its limit while commands wait to be received.

nvme-tcp copies every byte it receives, for each queue on one processor; rdma completes there. Two
witnesses: a processor with hardly any time left, much of it in softirq, while restores wait; and
the part of the commands' time from the first sign of the answer to its completion. The second
alone may as well be the link's rate, and counts for less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import DeviceAccount, Ledger
from kvprobe.findings import Detector
from kvprobe.findings._depth import UNWITNESSED
from kvprobe.findings._storage import (
    DEVICE_BOUND,
    MIN_COMMANDS,
    at_stake,
    depth_while,
    device_share,
    kv_commands,
    restoring,
    storage_name,
)
from kvprobe.findings._weigh import MIN_REQUESTS, confidence, severity
from kvprobe.model import Evidence, Finding

TRANSPORTS = ("tcp", "rdma")
BUSY_SHARE = 0.9
"""Of one processor: what runs next waits for it most of the time."""
SOFTIRQ_SHARE = 0.4
"""Of one processor: an engine's own work is no softirq, so that this much is the network's."""
CERTAIN_SOFTIRQ = 0.8
RECEIVE_SHARE = 0.25
"""Of the commands' time; receiving 1 MiB at memory speed takes 0.1 ms of the usual 1 ms."""
ALONE_SHARE = 0.6
"""The same where no processor was watched: most of the time of a command."""
MIN_DEPTH = 1.0
"""Commands in flight while restores wait: queues do wait."""
MIN_SAMPLES = 5
"""Seconds watched."""


@dataclass(frozen=True)
class _Processor:
    """The processor that spent most time in softirq while restores waited."""

    name: str
    busy: float
    softirq: float
    samples: int


def _detect(ledger: Ledger) -> list[Finding]:
    devices = [d for d in ledger.kv_devices if d.path and d.path.facts.transport in TRANSPORTS]
    requests = restoring(ledger)
    rows = kv_commands(ledger)
    share = device_share(requests)
    if not devices or not rows or len(requests) < MIN_REQUESTS or share is None:
        return []
    depth = depth_while(ledger, rows, ledger.waiting).waiting_mean or 0.0
    if share < DEVICE_BOUND or depth < MIN_DEPTH or len(rows["op"]) < MIN_COMMANDS:
        return []
    received, n = _receive_share(devices)
    core = _worst_processor(ledger)
    sure = _sure(core, received, n)
    if sure is None:
        return []
    evidence = [
        Evidence("commands in flight while restores waited, mean", depth, "", len(rows["op"]))
    ]
    if core is not None:
        evidence += [
            Evidence(f"{core.name} in softirq while restores waited", core.softirq, "share",
                     core.samples),
            Evidence(f"{core.name} busy while restores waited", core.busy, "share", core.samples),
        ]  # fmt: skip
    if received is not None:
        evidence.append(
            Evidence("share of commands' time from first sign to completion", received, "share", n)
        )
    cost = share * received if received is not None else None
    return [
        Finding(
            slug="cpu_bound_transport",
            severity=severity(None if cost is None else at_stake(requests, cost)),
            confidence=round(sure, 3),
            subject=f"{core.name} of {storage_name(ledger)}" if core else storage_name(ledger),
            evidence=tuple(evidence),
            would_disprove="that processor with time to spare while commands wait as long, or "
            "a link at its rate",
        )
    ]


def _sure(core: _Processor | None, received: float | None, n: int) -> float | None:
    """How sure the finding is; None: the witnesses do not agree on it."""
    if core is None:
        if received is None or received < ALONE_SHARE:
            return None
        return confidence(n, received, ALONE_SHARE, 1.0) * UNWITNESSED
    if core.busy < BUSY_SHARE or core.softirq < SOFTIRQ_SHARE:
        return None
    sure = confidence(core.samples, core.softirq, SOFTIRQ_SHARE, CERTAIN_SOFTIRQ)
    if received is None:
        return sure * UNWITNESSED
    return sure if received >= RECEIVE_SHARE else None


def _receive_share(devices: list[DeviceAccount]) -> tuple[float | None, int]:
    """Share of the commands' time in the receive segment; None where it is part of a larger one."""
    segments = [s for device in devices for s in device.segments]
    own = [s for s in segments if s.parts == ("receive",)]
    whole = sum(s.total_ns for s in segments)
    if not own or whole <= 0:
        return None, 0
    return sum(s.total_ns for s in own) / whole, sum(s.n for s in own)


def _worst_processor(ledger: Ledger) -> _Processor | None:
    """From the host's counters, weighted by how much of each second restores waited."""
    host = ledger.host
    if not host or not len(host["time_ns"]):
        return None
    found = []
    for name in sorted({s for s in host["subject"].tolist() if s and s.startswith("cpu")}):
        softirq, samples = _share_while_waiting(ledger, "cpu_softirq_ns", name)
        busy, _ = _share_while_waiting(ledger, "cpu_busy_ns", name)
        if softirq is not None and busy is not None and samples >= MIN_SAMPLES:
            found.append(_Processor(name, busy, softirq, samples))
    return max(found, key=lambda core: core.softirq, default=None)


def _share_while_waiting(ledger: Ledger, metric: str, name: str) -> tuple[float | None, int]:
    """A counter's growth as a share of time, over the intervals in which restores waited."""
    host = ledger.host
    mine = (host["metric"] == metric) & (host["subject"] == name)
    time, value = host["time_ns"][mine], host["value"][mine]
    order = np.argsort(time, kind="stable")
    time, value = time[order], value[order]
    span = np.diff(time)
    waited = np.diff(intervals.covered_below(*ledger.waiting, time))
    used = (span > 0) & (waited > 0)
    if not used.any():
        return None, 0
    rate = np.diff(value)[used] / span[used]
    return float(np.average(rate, weights=waited[used])), int(used.sum())


DETECTOR = Detector("cpu_bound_transport", "a processor's receive work holds commands up", _detect)
