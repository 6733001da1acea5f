"""The storage side of a window: devices and paths, the commands they served, their accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.tables import Tables
from kvprobe.correlator import commands, queues, segments, service
from kvprobe.correlator.intervals import union
from kvprobe.correlator.ledger import Account, DeviceAccount
from kvprobe.correlator.paths import Paths
from kvprobe.model import DeviceFacts, Frame, Loss, ServiceCell

Ints = NDArray[np.int64]

NO_DISK = 0
"""The device number of what a controller asks for itself: admin and fabrics commands."""


@dataclass(frozen=True)
class Storage:
    """Rows of a window under the device numbers that ``paths`` counts them under."""

    paths: Paths
    block: Frame
    depth: Frame
    commands: Frame
    fabric: Frame


def gather(tables: Tables) -> Storage:
    """Join commands to block rows and bring all rows of a path under one number.

    Raises:
        KvprobeError: a table is damaged.
    """
    paths = Paths(tables.manifest.nvme_paths)
    block, nvme, depth = tables.frame("block"), tables.frame("nvme"), tables.frame("depth")
    owner = commands.join(nvme, block)
    controller = np.full(len(block["done_ns"]), -1, np.int64)
    joined = owner >= 0
    controller[owner[joined]] = nvme["controller"][joined]
    block = {**block, "device": paths.device_of(block["device"], controller)}
    nobody = np.full(len(depth["device"]), -1, np.int64)
    return Storage(
        paths=paths,
        block=block,
        depth={**depth, "device": paths.device_of(depth["device"], nobody)},
        commands=commands.commands(nvme, block, owner, paths.device_of),
        fabric=tables.frame("fabric"),
    )


def waiting(accounts: Sequence[Account]) -> tuple[Ints, Ints]:
    """When at least one request waited for its restore: sorted, disjoint intervals."""
    spent = [
        (max(a.first_read_ns, a.arrival_ns), a.restore.exposed_ns)
        for a in accounts
        if a.restore is not None and a.first_read_ns is not None
    ]
    start, length = np.array(spent, np.int64).reshape(-1, 2).T
    return union(start, start + length)


def account_devices(
    storage: Storage,
    manifest: Manifest,
    cells: tuple[ServiceCell, ...],
    kv_device: int | None,
    waits: tuple[Ints, Ints],
) -> tuple[DeviceAccount, ...]:
    """One account per device with rows, the KV device first, then the other paths of its head.

    In-kernel sums cover all devices; those without a row are what the filters left out, and are
    shown only when no device has rows.

    Args:
        storage: the rows.
        manifest: facts, window and losses.
        cells: the service surface of ``kv_device``.
        kv_device: the device most KV reads came from; None: none was tied to a KV file, and the
            busiest takes its place.
        waits: when restores waited.
    """
    paths, rows = storage.paths, storage.commands
    kv_device = _busiest(storage) if kv_device is None else kv_device
    seen = storage.block["device"] if len(storage.block["device"]) else storage.depth["device"]
    # A path whose rows of one kind were lost, or that nobody used, is a device all the same.
    sisters = paths.sisters(kv_device) if kv_device is not None else ()
    found = {*np.unique(seen).tolist(), *np.unique(rows["device"]).tolist(), *sisters}
    numbers = sorted(number for number in found if number > NO_DISK)
    facts = [paths.facts(number, manifest.devices) for number in numbers]
    plain = service.account_devices(facts, storage.block, storage.depth, cells, kv_device)
    heads = {number: paths.head(number) or number for number in numbers}
    wholes = {
        head: _whole(rows, [number for number in numbers if heads[number] == head])
        for head in heads.values()
    }
    made = [
        _with_queues(device, storage, manifest, waits, wholes[heads[device.facts.device]])
        for device in plain
    ]
    return tuple(sorted(made, key=lambda device: device.facts.device not in sisters))


def _busiest(storage: Storage) -> int | None:
    """The device with most bytes, an NVMe path where there is one: below it may be a target."""
    rows = storage.commands
    numbers, place = np.unique(rows["device"], return_inverse=True)
    moved = np.bincount(place.reshape(-1), rows["bytes"], len(numbers)).tolist()
    busiest = max(
        zip(numbers.tolist(), moved, strict=True),
        key=lambda each: (storage.paths.head(each[0]) is not None, each[1]),
        default=None,
    )
    return busiest[0] if busiest else None


def _whole(rows: Frame, devices: list[int]) -> tuple[int, int]:
    """Commands, and bytes of reads and writes, of all paths of a head."""
    mine = np.isin(rows["device"], devices)
    moved = mine & (rows["op"] != commands.OTHER)
    return int(mine.sum()), int(rows["bytes"][moved].sum())


def _with_queues(
    device: DeviceAccount,
    storage: Storage,
    manifest: Manifest,
    waits: tuple[Ints, Ints],
    whole: tuple[int, int],
) -> DeviceAccount:
    number = device.facts.device
    own = storage.commands["device"] == number
    rows = select(storage.commands, own)
    table = "nvme" if (rows["controller"] >= 0).any() else "block"
    recorded = "fabric" in manifest.losses
    path = storage.paths.account(number, storage.fabric, recorded, _served_ns(rows, storage.block))
    head = storage.paths.head(number)
    over = queues.depth(rows["start_ns"], rows["done_ns"], manifest.window_ns, waits)
    sizes: dict[int, int | None] = {-1: _block_queue_size(device.facts)}
    if path is not None:
        # A controller of another number is the same path before or after a reconnect.
        used = [*np.unique(rows["controller"]).tolist(), path.facts.controller]
        limits = (path.facts.queue_size, _block_queue_size(device.facts))
        sizes = dict.fromkeys(used, min((n for n in limits if n), default=None))
    return replace(
        device,
        numbers=storage.paths.numbers(number),
        head=head,
        head_facts=next((f for f in manifest.devices if f.name == head), None),
        path=path,
        load=queues.load(rows, over, manifest.window_ns, whole),
        queues=queues.accounts(rows, manifest.window_ns, waits, whole, sizes),
        segments=segments.division(rows, manifest.missing) if table == "nvme" else (),
        counted_from=table,
        lost_share=_lost_share(manifest.losses.get(table, Loss())),
    )


def _served_ns(rows: Frame, block: Frame) -> Ints:
    """Set-up of the commands whose requests moved bytes: one that failed over moved none."""
    joined = np.flatnonzero(rows["block"] >= 0)
    served: Ints = rows["start_ns"][joined[block["bytes"][rows["block"][joined]] > 0]]
    return served


def _block_queue_size(facts: DeviceFacts) -> int | None:
    """Requests a hardware queue holds; with a scheduler ``nr_requests`` is of the scheduler."""
    return facts.nr_requests if facts.scheduler == "none" else None


def _lost_share(loss: Loss) -> float:
    whole = loss.rows + loss.lost + loss.thinned
    return (loss.lost + loss.thinned) / whole if whole else 0.0
