"""From the tables of a window to its ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import select
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.tables import Tables
from kvprobe.correlator import bursts, gds, hits, intervals, routes, service, storage
from kvprobe.correlator.account import Join, account
from kvprobe.correlator.attribute import Attribution, attribute
from kvprobe.correlator.gpu.analysis import with_gpus
from kvprobe.correlator.identify import KVFiles, identify
from kvprobe.correlator.ledger import CLASSES, Account, DeviceAccount, Ledger, Restore
from kvprobe.correlator.read_ahead import read_ahead
from kvprobe.correlator.tie import tie
from kvprobe.correlator.totals import engine_totals
from kvprobe.model import EngineFacts, Frame, Loss, RestoreSample
from kvprobe.schema import CUFILE_CALLS, OpKind

Ints = NDArray[np.int64]


def correlate(tables: Tables) -> Ledger:
    """Join requests, operations and block rows of one window.

    Raises:
        KvprobeError: a table is damaged.
    """
    manifest = tables.manifest
    host = tables.frame("host")
    requests, outside = _within(tables.frame("requests"), manifest.window_ns)
    requests = hits.fill_in(requests, host)
    stored = storage.gather(tables)
    layers = gds.layers(tables.frame("ops"))
    ops, block = layers.ops, stored.block
    lookups = tables.frame("lookups")
    engine = manifest.engine
    unit_tokens = engine.unit_tokens if engine else None
    files = identify(lookups, ops)
    who = _attribute(tables, requests, lookups, ops, files)
    owner = layers.owner(tie(block, layers.every))
    kv = np.flatnonzero(files.op_key >= 0)
    kv_ops = _kv_ops(ops, kv, files, who)
    kv_block = {**block, "owner": _among(kv, owner, len(ops["start_ns"]))}
    device = _kv_device(kv_block)
    sisters = stored.paths.sisters(device) if device is not None else ()
    left_out = _rows_left_out(manifest, kv_ops, kv_block)
    gpu_direct = gds.account(layers, block, owner, host, tables.frame("knobs"), left_out)
    left_out |= gpu_direct is not None and _mostly_unseen(gpu_direct, kv_ops)
    join = Join(requests, lookups, ops, block, who, owner, sisters, left_out, manifest.window_ns)
    accounts = [account(join, files, i, unit_tokens) for i in range(len(requests["id"]))]
    rate = _bytes_per_token(engine, accounts, kv_ops)
    accounts = [hits.split(each, rate) for each in accounts]
    fitted = routes.Routes.fit(accounts)
    accounts = [routes.judge(each, fitted, rate) for each in accounts]
    waits = storage.waiting(accounts)
    cells = service.surface(kv_ops)
    devices = storage.account_devices(stored, manifest, cells, device, waits)
    ledger = Ledger(
        window_ns=manifest.window_ns,
        engine=engine,
        accounts=tuple(accounts),
        break_even=routes.break_even(fitted, accounts, rate),
        devices=_only_complete(devices, manifest.losses.get("block")),
        restore=_restore_sample(accounts),
        read_ahead=read_ahead(kv_ops, kv_block),
        losses=dict(manifest.losses),
        outside_requests=outside,
        attributed_bytes=_bytes_by_class(kv_ops),
        ops=kv_ops,
        block=kv_block,
        commands=stored.commands,
        fabric=stored.fabric,
        host=host,
        totals=engine_totals(host, _seen(lookups, files, kv_ops)),
        knobs=tables.frame("knobs"),
        waiting=waits,
        cpus=manifest.host.cpus,
        missing=manifest.missing,
        gds=gpu_direct,
    )
    return with_gpus(ledger, tables.frame("gpu"), manifest.gpu)


def _attribute(
    tables: Tables, requests: Frame, lookups: Frame, ops: Frame, files: KVFiles
) -> Attribution:
    """Attribute with what the engine and the losses of the window say."""
    engine = tables.manifest.engine
    unit_tokens = engine.unit_tokens if engine else None
    fan_out = (engine.reads_in_flight if engine else None) or 1
    lost = tables.manifest.losses.get("lookups", Loss())
    lossy = lost.lost + lost.thinned > 0
    keys = tables.frame("keys")
    return attribute(requests, keys, lookups, ops, files, unit_tokens, fan_out, lossy)


def _within(requests: Frame, window_ns: tuple[int, int]) -> tuple[Frame, int]:
    """Requests that were not over before the window nor came after it, and how many were or did.

    An engine's event file often holds its whole history, its log what it said of requests whose
    spans came before; and signals are waited for a little. One without any time is kept where no
    request has any.
    """
    times = [column for name, column in requests.items() if name.endswith("_ns")]
    times = [column for column in times if column is not requests["uncertainty_ns"]]
    last = np.max(times, axis=0) if len(requests["id"]) else np.empty(0, np.int64)
    kept = (last >= window_ns[0]) | (not (last >= 0).any())
    kept &= requests["arrival_ns"] <= window_ns[1]
    if kept.all():
        return requests, 0
    return select(requests, kept), int((~kept).sum())


SERVED_SHARE = 0.5
"""Share of directly read bytes with block rows below which rows must have been filtered out."""


def _rows_left_out(manifest: Manifest, kv_ops: Frame, kv_block: Frame) -> bool:
    """Whether block rows of KV reads are missing on purpose: thinned, or filtered by a rule."""
    filters, loss = manifest.filters, manifest.losses.get("block", Loss())
    if filters.keep_one_in > 1 or filters.min_latency_ns > 0 or loss.thinned:
        return True
    direct = _reads(kv_ops) & (kv_ops["direct"] == 1) & ~np.isin(kv_ops["kind"], CUFILE_CALLS)
    rows = (kv_block["owner"] >= 0) & (kv_block["op"] == 0)
    if direct.any():
        served = rows & direct[np.maximum(kv_block["owner"], 0)]
        asked = int(kv_ops["result"][direct].sum())
        return int(kv_block["bytes"][served].sum()) < SERVED_SHARE * asked
    return filters.device is not None and not rows.any()


def _among(chosen: Ints, index: Ints, count: int) -> Ints:
    """Indices of ``count`` rows (or -1) as indices of the chosen ones."""
    place = np.full(count + 1, -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    return place[index]


def _mostly_unseen(found: gds.GpuDirect, kv_ops: Frame) -> bool:
    """Whether most KV bytes came past system calls and block layer, where nobody sees them."""
    unseen = found.reads.unseen_bytes or 0
    return unseen > SERVED_SHARE * int(kv_ops["result"][_reads(kv_ops)].sum())


def _kv_ops(ops: Frame, kv: Ints, files: KVFiles, who: Attribution) -> Frame:
    frame = select(ops, kv)
    keys = np.array([*files.keys, None], object)
    return {
        **frame,
        "key": keys[files.op_key[kv]],
        "request": who.op_request[kv],
        "class": who.op_class[kv],
    }


def _reads(kv_ops: Frame) -> NDArray[np.bool_]:
    """Which operations brought bytes from storage."""
    done: NDArray[np.bool_] = (kv_ops["kind"] < OpKind.WRITE) & (kv_ops["result"] > 0)
    return done


def _seen(lookups: Frame, files: KVFiles, kv_ops: Frame) -> dict[str, int]:
    """Own figures of what engines count."""
    read = _reads(kv_ops)
    tests = bursts.existence_tests(lookups, files)
    return {
        "read_bytes": int(kv_ops["result"][read].sum()),
        "chunk_hits": int((lookups["result"][tests] >= 0).sum()),
    }


def _bytes_by_class(kv_ops: Frame) -> dict[str, int]:
    read = _reads(kv_ops)
    return {
        name: int(kv_ops["result"][read & (kv_ops["class"] == i)].sum())
        for i, name in enumerate(CLASSES)
    }


def _kv_device(kv_block: Frame) -> int | None:
    """The device that served most bytes of KV operations."""
    served = kv_block["owner"] >= 0
    if not served.any():
        return None
    device, place = np.unique(kv_block["device"][served], return_inverse=True)
    return int(device[np.bincount(place.reshape(-1), kv_block["bytes"][served]).argmax()])


def _bytes_per_token(
    engine: EngineFacts | None, accounts: list[Account], kv_ops: Frame
) -> float | None:
    """The engine's word, else the median of restored bytes over restored tokens."""
    if engine is not None:
        if engine.bytes_per_token:
            return float(engine.bytes_per_token)
        if engine.unit_bytes and engine.unit_tokens:
            return engine.unit_bytes / engine.unit_tokens * _files_per_key(kv_ops)
    ratios = [
        a.restore.bytes / a.storage_hit_tokens
        for a in accounts
        if a.restore and a.restore.bytes and a.storage_hit_tokens
    ]
    return float(np.median(ratios)) if ratios else None


def _files_per_key(kv_ops: Frame) -> int:
    """Files that hold one chunk: several where each rank of an engine keeps its own."""
    read = _reads(kv_ops)
    if not read.any():
        return 1
    keys = np.unique(kv_ops["key"][read].astype(str), return_inverse=True)[1].reshape(-1)
    files = np.stack([keys, kv_ops["fs_device"][read], kv_ops["inode"][read]], axis=1)
    return int(np.median(np.bincount(np.unique(files, axis=0)[:, 0])))


def _only_complete(
    devices: tuple[DeviceAccount, ...], loss: Loss | None
) -> tuple[DeviceAccount, ...]:
    """Little's law compares rows with complete sums: no verdict when rows are missing."""
    if loss is None or not (loss.lost or loss.thinned):
        return devices
    return tuple(replace(d, little_ratio=None) for d in devices)


def _restore_sample(accounts: list[Account]) -> RestoreSample | None:
    done = [a for a in accounts if a.restore is not None and a.restore.bytes > 0]
    # Of a request that was cut off the restore is known and the whole is not: no mean of both.
    done = [a for a in done if a.ttft_ns is not None] or done
    parts: list[Restore] = [a.restore for a in done if a.restore is not None]
    if not parts or any(r.device_ns is None for r in parts):
        return None
    depths = [r.effective_depth for r in parts if r.effective_depth is not None]
    return RestoreSample(
        n=len(parts),
        bytes=sum(r.bytes for r in parts),
        ops=sum(r.ops for r in parts),
        restore_ns=sum(r.exposed_ns for r in parts),
        device_ns=sum(r.device_ns or 0 for r in parts),
        block_queue_ns=sum(r.block_queue_ns or 0 for r in parts),
        software_ns=sum(r.software_ns or 0 for r in parts),
        idle_ns=sum(r.idle_ns for r in parts),
        ttft_ns=sum(a.ttft_ns for a in done if a.ttft_ns is not None),
        effective_depth=float(np.mean(depths)) if depths else 1.0,
        restoring_at_once=_restoring_at_once(done),
    )


def _restoring_at_once(accounts: list[Account]) -> float | None:
    """Requests with an exposed restore at the same time, as a restoring one sees it."""
    spent = [
        (max(a.first_read_ns, a.arrival_ns), a.restore.exposed_ns)
        for a in accounts
        if a.restore is not None and a.first_read_ns is not None and a.restore.exposed_ns > 0
    ]
    if not spent:
        return None
    start, length = np.array(spent, np.int64).T
    low, high, _, together = intervals.step_function(start, start + length, np.ones(len(start)))
    seen = (high - low) * together
    return float((seen * together).sum() / seen.sum())
