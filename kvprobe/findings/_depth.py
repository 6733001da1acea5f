"""How much a device had to do while requests restored: what several detectors ask."""

from __future__ import annotations

import numpy as np

from kvprobe.correlator import intervals
from kvprobe.correlator.ledger import DeviceAccount, Ledger
from kvprobe.findings._weigh import Restored
from kvprobe.schema import OpKind

MIN_READS = 3
"""A restore of one or two units has nothing to overlap: a large unit is not a serial restore."""
MIN_COMMANDS_A_READ = 1 / 16
"""Read-ahead serves up to some dozen reads by one command; fewer commands mean page cache hits."""
SERIAL_DEPTH = 1.25
"""Two reads that overlap during a quarter of the restore; more is no accident of timing."""
SERIAL_BYTES_SHARE = 0.5
"""Most of the restored bytes came that way."""
BUSY_DEPTH = 8.0
"""Requests outstanding, while any is, from which a device may be busy: flash needs 8 to 32 of
them (one unit may be cut into many, other requests may read)."""
MIN_SPEED_UP = 1.2
"""Where the rate at more depth was measured: what would make more reads in flight worth it."""
UNWITNESSED = 0.5
"""Factor on the confidence when nothing says how busy the device was, or what it could do."""


def from_device(requests: list[Restored]) -> list[Restored]:
    """Leave out restores that memory served: there is nothing to overlap with.

    Where no restore has a command, none was recorded and nothing is left out.
    """
    served = [r for r in requests if r.restore.commands >= MIN_COMMANDS_A_READ * r.restore.ops]
    return served if any(r.restore.commands for r in requests) else requests


def serial_share(requests: list[Restored]) -> float:
    """Share of the restored bytes that restores of several reads read one after another."""
    serial = [r for r in requests if r.restore.ops >= MIN_READS and is_serial(r)]
    whole = sum(r.restore.bytes for r in requests)
    return sum(r.restore.bytes for r in serial) / whole if whole else 0.0


def is_serial(request: Restored) -> bool:
    """Whether its reads hardly overlapped; no where that is unknown."""
    depth = request.restore.effective_depth
    return depth is not None and depth <= SERIAL_DEPTH


def busy_depth(devices: tuple[DeviceAccount, ...]) -> float | None:
    """Mean depth of the devices together over the time that they had anything to do.

    Paths of one head take turns at best, so that their busy times add up.
    """
    known = [
        (d.mean_depth, d.time_at_zero_share)
        for d in devices
        if d.mean_depth is not None and d.time_at_zero_share is not None
    ]
    busy = min(1.0, sum(1 - zero for _, zero in known))
    return sum(mean for mean, _ in known) / busy if busy > 0 else None


def depth_of_reads(ledger: Ledger) -> tuple[float | None, int]:
    """Reads of the KV cache open at once, mean over the time that any is; how many there are."""
    ops = ledger.ops
    reads = (ops["kind"] < OpKind.WRITE) & (ops["end_ns"] > ops["start_ns"])
    mean = intervals.mean_depth(ops["start_ns"][reads], ops["end_ns"][reads])
    return mean, int(np.count_nonzero(reads))


def measured_speed_up(ledger: Ledger) -> tuple[float | None, int]:
    """Best rate at twice the present depth or more over the rate now; cells behind it."""
    present, _ = depth_of_reads(ledger)
    cells = [c for c in (ledger.devices[0].surface if ledger.devices else ()) if c.bytes_per_s > 0]
    if present is None or not cells:
        return None, 0
    now = min(cells, key=lambda c: abs(c.depth - present))
    deeper = [c for c in cells if c.size_bytes == now.size_bytes and c.depth >= 2 * present]
    if not deeper:
        return None, 0
    return max(c.bytes_per_s for c in deeper) / now.bytes_per_s, len(deeper) + 1


def median(values: list[float]) -> float:
    """Of at least one value."""
    return float(np.median(values))
