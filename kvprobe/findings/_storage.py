"""What detectors of the storage path share: the commands under the KV cache, and what they cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.correlator import queues
from kvprobe.correlator.commands import READ
from kvprobe.correlator.ledger import DeviceAccount, Ledger, QueueAccount
from kvprobe.findings._depth import from_device
from kvprobe.findings._weigh import Restored, restored, share_of_ttft
from kvprobe.model import Evidence, Frame
from kvprobe.sources.nvme import short_address

Ints = NDArray[np.int64]

MIN_COMMANDS = 30
"""Fewer say nothing about a distribution."""
MOST_LOST = 0.01
"""Share of rows lost or thinned up to which a depth that is counted from rows is trusted: it is
too low by about that share."""
FULL_SHARE = 0.1
"""Of the commands with which a queue was full: so many had to wait for a tag, or nearly. Where
depth is less than the size, none has."""
MIN_LOAD_SHARE = 0.1
"""Of the KV devices' bytes: a queue that carries less does not decide how long restores take."""
DEVICE_BOUND = 0.5
"""Most of the restores' time passes at the device: what happens there decides."""


def kv_commands(ledger: Ledger, only_reads: bool = True) -> Frame:
    """Commands of the devices that serve the KV cache; empty where none were joined."""
    rows = ledger.commands
    if not rows:
        return {}
    mine = np.isin(rows["device"], [d.facts.device for d in ledger.kv_devices])
    if only_reads:
        mine &= rows["op"] == READ
    return rows if mine.all() else select(rows, mine)


def rows_are_whole(ledger: Ledger) -> bool:
    """Whether hardly a command of the KV devices is missing, or of unknown time."""
    devices, rows = ledger.kv_devices, kv_commands(ledger)
    if not devices or not rows or any(device.lost_share > MOST_LOST for device in devices):
        return False
    return float((rows["start_ns"] < 0).mean()) <= MOST_LOST if len(rows["op"]) else True


def restoring(ledger: Ledger) -> list[Restored]:
    """Requests that restored something from the device."""
    return from_device(restored(ledger))


def depth_while(ledger: Ledger, rows: Frame, waiting: tuple[Ints, Ints]) -> queues.Depth:
    """Depth of these commands over the window, and while requests waited."""
    return queues.depth(rows["start_ns"], rows["done_ns"], ledger.window_ns, waiting)


def device_share(requests: list[Restored]) -> float | None:
    """Share of the exposed restores that passed at the device; None where a part is unknown."""
    parts = [r.restore.device_ns for r in requests]
    exposed = sum(r.restore.exposed_ns for r in requests)
    if None in parts or exposed <= 0:
        return None
    return sum(part or 0 for part in parts) / exposed


def at_stake(requests: list[Restored], share: float) -> float | None:
    """A share of the exposed restores as a share of the time to first token."""
    return share_of_ttft((share * r.restore.exposed_ns, r.account) for r in requests)


def full_queues(ledger: Ledger) -> list[tuple[QueueAccount, float, int]]:
    """Queues with something to say that held all they can: with the share found full, the size."""
    return [
        (queue, queue.found_full_share, queue.queue_size)
        for device in ledger.kv_devices
        for queue in device.queues
        if queue.found_full_share is not None
        and queue.queue_size
        and queue.found_full_share >= FULL_SHARE
        and queue.load.commands >= MIN_COMMANDS
        and (queue.load.share or 0) >= MIN_LOAD_SHARE
    ]


def io_queues(ledger: Ledger) -> int | None:
    """I/O queues of each path's controller, the most of any; None where one is not known."""
    known = [d.path.facts.io_queues if d.path else None for d in ledger.kv_devices]
    counts = [count for count in known if count is not None]
    return max(counts) if counts and len(counts) == len(known) else None


def io_queue_evidence(ledger: Ledger) -> list[Evidence]:
    """How many queues there are, and for how many processors."""
    count = io_queues(ledger)
    if count is None:
        return []
    found = [Evidence("I/O queues of each controller", count, "", len(ledger.kv_devices))]
    if ledger.cpus is not None:
        found.append(Evidence("processors of the host", ledger.cpus, "", 1))
    return found


def storage_name(ledger: Ledger) -> str:
    """The disk that is mounted, as a finding's subject."""
    first = ledger.kv_devices[:1]
    return (first[0].head or first[0].facts.name) if first else "storage"


def path_name(device: DeviceAccount) -> str:
    """A path by the address that stays, with the disk name of now."""
    address = short_address(device.path.facts.address) if device.path else None
    return f"{address} ({device.facts.name})" if address else device.facts.name


def queue_name(controller: int | None, queue: int) -> str:
    """A queue pair as a person names it."""
    return f"hardware queue {queue}" if controller is None else f"nvme{controller} queue {queue}"
