"""One request's reads go one after another while the device could serve several."""

from __future__ import annotations

import numpy as np

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    Restored,
    confidence,
    engine_name,
    restored,
    severity,
    share_of_ttft,
)
from kvprobe.model import Evidence, Finding
from kvprobe.schema import OpKind

MIN_READS = 3
"""A restore of one or two units has nothing to overlap: a large unit is not a serial restore."""
MIN_COMMANDS_A_READ = 1 / 16
"""Read-ahead serves up to some dozen reads by one command; fewer commands mean page cache hits."""
SERIAL_DEPTH = 1.25
"""Two reads that overlap during a quarter of the restore; more is no accident of timing."""
SERIAL_BYTES_SHARE = 0.5
"""Most of the restored bytes came that way."""
CERTAIN_BYTES_SHARE = 0.9
BUSY_DEPTH = 8.0
"""Requests outstanding, while any is, from which the device may be busy in spite of serial
reads: flash needs 8 to 32 of them (one unit may be cut into many, other requests may read)."""
MIN_SPEED_UP = 1.2
"""Where the rate at more depth was measured: what would make more reads in flight worth it."""
UNWITNESSED = 0.5
"""Factor on the confidence when nothing says how busy the device was."""


def _detect(ledger: Ledger) -> list[Finding]:
    requests = _from_device(restored(ledger))
    several = [
        r for r in requests if r.restore.ops >= MIN_READS and r.restore.effective_depth is not None
    ]
    if len(several) < MIN_REQUESTS:
        return []
    serial = [r for r in several if (r.restore.effective_depth or 0) <= SERIAL_DEPTH]
    share = sum(r.restore.bytes for r in serial) / sum(r.restore.bytes for r in requests)
    exposed = sum(r.restore.exposed_ns for r in serial)
    if share < SERIAL_BYTES_SHARE or exposed <= 0:
        return []
    busy = _busy_depth(ledger)
    speed_up, cells = _measured_speed_up(ledger)
    if speed_up is not None and speed_up < MIN_SPEED_UP:
        return []
    if speed_up is None and busy is not None and busy >= BUSY_DEPTH:
        return []
    n = len(several)
    sure = confidence(n, share, SERIAL_BYTES_SHARE, CERTAIN_BYTES_SHARE)
    if busy is None and speed_up is None:
        sure = round(sure * UNWITNESSED, 3)
    depths = [r.restore.effective_depth for r in several]
    reads = sum(r.restore.ops for r in several)
    above = [
        r.restore.idle_ns + r.restore.software_ns
        for r in serial
        if r.restore.software_ns is not None
    ]
    waiting = sum(above) / exposed if len(above) == len(serial) else None
    at_stake = share_of_ttft(exposed, [r.account for r in requests])
    evidence = [
        Evidence("reads open at once in a restore, median", _median(depths), "", n),
        Evidence("reads a restore, mean", reads / n, "", n),
        Evidence("share of restored bytes read one after another", share, "share", n),
        Evidence(
            "share of those restores with nothing outstanding below the engine",
            waiting,
            "share",
            len(serial),
        ),
        Evidence("share of time to first token spent in them", at_stake, "share", len(serial)),
    ]
    if busy is not None:
        count = ledger.devices[0].reads + ledger.devices[0].writes
        evidence.append(Evidence("device requests outstanding while any is", busy, "", count))
    if speed_up is not None:
        evidence.append(Evidence("measured rate at more depth over now", speed_up, "x", cells))
    return [
        Finding(
            slug="serial_restore",
            severity=severity(at_stake),
            confidence=sure,
            subject=engine_name(ledger),
            evidence=tuple(evidence),
            would_disprove="a sweep in which the device reads units of this size no faster with "
            "8 reads in flight than with 1",
        )
    ]


def _from_device(requests: list[Restored]) -> list[Restored]:
    """Leave out restores that memory served: there is nothing to overlap with.

    Where no restore has a command, none was recorded and nothing is left out.
    """
    served = [r for r in requests if r.restore.commands >= MIN_COMMANDS_A_READ * r.restore.ops]
    return served if any(r.restore.commands for r in requests) else requests


def _median(values: list[float | None]) -> float:
    return float(np.median([v for v in values if v is not None]))


def _busy_depth(ledger: Ledger) -> float | None:
    """Mean depth of the device over the time it had anything to do."""
    if not ledger.devices:
        return None
    mean, zero = ledger.devices[0].mean_depth, ledger.devices[0].time_at_zero_share
    if mean is None or zero is None or zero >= 1:
        return None
    return mean / (1 - zero)


def _measured_speed_up(ledger: Ledger) -> tuple[float | None, int]:
    """Best rate at twice the present depth or more over the rate now; cells behind it."""
    ops = ledger.ops
    reads = (ops["kind"] < OpKind.WRITE) & (ops["end_ns"] > ops["start_ns"])
    present = intervals.mean_depth(ops["start_ns"][reads], ops["end_ns"][reads])
    cells = [c for c in (ledger.devices[0].surface if ledger.devices else ()) if c.bytes_per_s > 0]
    if present is None or not cells:
        return None, 0
    now = min(cells, key=lambda c: abs(c.depth - present))
    deeper = [c for c in cells if c.size_bytes == now.size_bytes and c.depth >= 2 * present]
    if not deeper:
        return None, 0
    return max(c.bytes_per_s for c in deeper) / now.bytes_per_s, len(deeper) + 1


DETECTOR = Detector("serial_restore", "a request's reads go one after another", _detect)
