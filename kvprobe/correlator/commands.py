"""Commands: what a device or a transport was given, joined to the block requests they served.

A request of the kernel is used again within microseconds, so its identity alone joins nothing:
a command belongs to the block row of the same request in whose life it was set up. That row is
the first of the request that was done after the command's set-up, since lives do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.model import Frame

Ints = NDArray[np.int64]

READ, WRITE, OTHER = 0, 1, 2
"""Values of ``op``, as in ``block``; all else is ``OTHER``."""
_OPCODES = {2: READ, 1: WRITE}


def join(nvme: Frame, block: Frame) -> Ints:
    """For each ``nvme`` row the index of its ``block`` row, or -1.

    Same ``request``, and set up within ``[queued_ns, done_ns]`` (a row of unknown ``queued_ns``
    has no lower end). One sort of both tables together: a million rows take about a second.
    """
    n = len(nvme["setup_ns"])
    found = np.full(n, -1, np.int64)
    if not n or not len(block["done_ns"]):
        return found
    request = np.concatenate([nvme["request"], block["request"]])
    time = np.concatenate([nvme["setup_ns"], block["done_ns"]])
    order = np.lexsort((time, request))  # stable: a command before a row that is done just then
    rows = order >= n
    # For each place the next one that holds a block row.
    after = np.where(rows, np.arange(len(order)), len(order))
    after = np.minimum.accumulate(after[::-1])[::-1]
    places = np.flatnonzero(~rows & (after < len(order)))
    command, row = order[places], order[after[places]] - n
    alive = (
        (nvme["request"][command] >= 0)
        & (nvme["request"][command] == block["request"][row])
        & (block["queued_ns"][row] <= nvme["setup_ns"][command])
    )
    found[command[alive]] = row[alive]
    return found


def commands(
    nvme: Frame, block: Frame, owner: Ints, device_of: Callable[[Ints, Ints], Ints]
) -> Frame:
    """All commands of all devices, in one form.

    Columns, -1 unknown: ``start_ns`` (set-up; without an ``nvme`` row the issue), ``sent_ns``,
    ``arrived_ns``, ``done_ns`` (as the driver saw it), ``end_ns`` (as the block layer did; of a
    retried request for its last command only), ``bytes``, ``op``, ``device``, ``controller``,
    ``queue``, ``transport``, ``retries``, ``block`` (index of the row). Admin commands and those
    of no device are left out. A device without any ``nvme`` row gives its block requests.

    Args:
        nvme: frame of the ``nvme`` table.
        block: frame of the ``block`` table.
        owner: result of ``join``.
        device_of: device numbers of rows (dev_t, controller) -> the number they are counted under.
    """
    own, served = _from_nvme(nvme, block, owner), _from_block(block)
    own["device"] = device_of(own["device"], own["controller"])
    served["device"] = device_of(served["device"], served["controller"])
    rest = ~np.isin(served["device"], np.unique(own["device"]))
    return {name: np.concatenate([own[name], served[name][rest]]) for name in own}


def _from_nvme(nvme: Frame, block: Frame, owner: Ints) -> Frame:
    row = np.maximum(owner, 0)
    joined = owner >= 0
    of_row = block["device"][row] if len(block["device"]) else np.full(len(owner), -1, np.int64)
    device = np.where((nvme["device"] < 0) & joined, of_row, nvme["device"])
    end = np.full(len(owner), -1, np.int64)
    last = _last_of_each(owner, nvme["setup_ns"])
    end[last] = block["done_ns"][owner[last]]
    op = np.full(len(owner), OTHER, np.int64)
    for opcode, meaning in _OPCODES.items():
        op[nvme["opcode"] == opcode] = meaning
    frame = {name: nvme[name] for name in ("sent_ns", "arrived_ns", "done_ns", "bytes", "retries")}
    frame |= {name: nvme[name] for name in ("controller", "queue", "transport")}
    frame |= {"start_ns": nvme["setup_ns"], "end_ns": end, "op": op}
    frame |= {"device": device, "block": owner}
    kept = (device >= 0) & (nvme["queue"] > 0)
    return select(frame, kept)


def _last_of_each(owner: Ints, setup: Ints) -> Ints:
    """Of the commands of each block row the one that was set up last."""
    joined = np.flatnonzero(owner >= 0)
    order = joined[np.lexsort((setup[joined], owner[joined]))]
    if not len(order):
        return order
    last: Ints = order[np.append(np.diff(owner[order]) != 0, True)]
    return last


def _from_block(block: Frame) -> Frame:
    n = len(block["done_ns"])
    unknown = np.full(n, -1, np.int64)
    issued = block["issued_ns"]
    op = block["op"]
    return {
        "start_ns": np.where(issued >= 0, issued, block["queued_ns"]),
        "sent_ns": unknown,
        "arrived_ns": unknown,
        "done_ns": block["done_ns"],
        "end_ns": block["done_ns"],
        "bytes": block["bytes"],
        "op": np.where((op == READ) | (op == WRITE), op, OTHER),
        "device": block["device"],
        "controller": unknown,
        "queue": block["hw_queue"],
        "transport": np.zeros(n, np.int64),
        "retries": np.zeros(n, np.int64),
        "block": np.arange(n),
    }
