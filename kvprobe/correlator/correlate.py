"""From the tables of a window to its ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.manifest import Manifest
from kvprobe.capture.tables import Tables
from kvprobe.correlator import bursts, hits, intervals, routes, service, spans, storage
from kvprobe.correlator.attribute import Attribution, attribute
from kvprobe.correlator.identify import KVFiles, identify
from kvprobe.correlator.ledger import CLASSES, Account, DeviceAccount, Ledger, Restore
from kvprobe.correlator.read_ahead import read_ahead
from kvprobe.correlator.tie import tie
from kvprobe.correlator.totals import engine_totals
from kvprobe.model import EngineFacts, Frame, Loss, RestoreSample, Verdict
from kvprobe.schema import OpKind

Ints = NDArray[np.int64]


def correlate(tables: Tables) -> Ledger:
    """Join requests, operations and block rows of one window.

    Raises:
        KvprobeError: a table is damaged.
    """
    manifest = tables.manifest
    host = tables.frame("host")
    requests, earlier = _since(tables.frame("requests"), manifest.start_ns)
    requests = hits.fill_in(requests, host)
    stored = storage.gather(tables)
    ops, block = tables.frame("ops"), stored.block
    lookups = tables.frame("lookups")
    engine = manifest.engine
    unit_tokens = engine.unit_tokens if engine else None
    files = identify(lookups, ops)
    fan_out = (engine.reads_in_flight if engine else None) or 1
    lost = manifest.losses.get("lookups", Loss())
    lossy = lost.lost + lost.thinned > 0
    keys = tables.frame("keys")
    who = attribute(requests, keys, lookups, ops, files, unit_tokens, fan_out, lossy)
    owner = tie(block, ops)
    kv = np.flatnonzero(files.op_key >= 0)
    kv_ops = _kv_ops(ops, kv, files, who)
    kv_owner = np.full(len(ops["start_ns"]) + 1, -1, np.int64)
    kv_owner[kv] = np.arange(len(kv))
    kv_block = {**block, "owner": kv_owner[owner]}
    device = _kv_device(kv_block)
    sisters = stored.paths.sisters(device) if device is not None else ()
    left_out = _rows_left_out(manifest, kv_ops, kv_block)
    join = _Join(requests, lookups, ops, block, who, owner, sisters, left_out, manifest.start_ns)
    accounts = [_account(join, files, i, unit_tokens) for i in range(len(requests["id"]))]
    rate = _bytes_per_token(engine, accounts)
    accounts = [hits.split(account, rate) for account in accounts]
    fitted = routes.Routes.fit(accounts)
    accounts = [routes.judge(account, fitted, rate) for account in accounts]
    waits = storage.waiting(accounts)
    cells = service.surface(kv_ops)
    devices = storage.account_devices(stored, manifest, cells, device, waits)
    return Ledger(
        window_ns=manifest.window_ns,
        engine=engine,
        accounts=tuple(accounts),
        break_even=routes.break_even(fitted, accounts, rate),
        devices=_only_complete(devices, manifest.losses.get("block")),
        restore=_restore_sample(accounts),
        read_ahead=read_ahead(kv_ops, kv_block),
        losses=dict(manifest.losses),
        earlier_requests=earlier,
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
    )


def _since(requests: Frame, start_ns: int) -> tuple[Frame, int]:
    """Requests that were not over before the window, and how many were.

    An engine's event file often holds its whole history.
    """
    times = [column for name, column in requests.items() if name.endswith("_ns")]
    last = np.max(times, axis=0) if len(requests["id"]) else np.empty(0, np.int64)
    kept = (last < 0) | (last >= start_ns)
    if kept.all():
        return requests, 0
    return {name: column[kept] for name, column in requests.items()}, int((~kept).sum())


SERVED_SHARE = 0.5
"""Share of directly read bytes with block rows below which rows must have been filtered out."""


def _rows_left_out(manifest: Manifest, kv_ops: Frame, kv_block: Frame) -> bool:
    """Whether block rows of KV reads are missing on purpose: thinned, or filtered by a rule."""
    filters, loss = manifest.filters, manifest.losses.get("block", Loss())
    if filters.keep_one_in > 1 or filters.min_latency_ns > 0 or loss.thinned:
        return True
    direct = (kv_ops["kind"] < OpKind.WRITE) & (kv_ops["result"] > 0) & (kv_ops["direct"] == 1)
    rows = (kv_block["owner"] >= 0) & (kv_block["op"] == 0)
    if direct.any():
        served = rows & direct[np.maximum(kv_block["owner"], 0)]
        asked = int(kv_ops["result"][direct].sum())
        return int(kv_block["bytes"][served].sum()) < SERVED_SHARE * asked
    return filters.device is not None and not rows.any()


MOST_DOUBT = 0.1
"""Doubt about an engine's times, as a share of the time to first token, up to which a request is
cut into spans: beyond it their borders would be inventions."""


class _Groups:
    """Rows by an integer label, as slices of one sorted index."""

    def __init__(self, label: Ints) -> None:
        self._order = np.argsort(label, kind="stable")
        self._label = label[self._order]

    def __getitem__(self, label: int) -> Ints:
        first, last = np.searchsorted(self._label, [label, label + 1])
        return self._order[first:last]

    def of(self, labels: Ints) -> Ints:
        """Rows of several labels, one label after another."""
        first = np.searchsorted(self._label, labels)
        count = np.searchsorted(self._label, labels, side="right") - first
        before = np.cumsum(count) - count
        rows: Ints = self._order[np.repeat(first - before, count) + np.arange(count.sum())]
        return rows


class _Join:
    """The tables of a window and who belongs to whom, indexed for one request at a time."""

    def __init__(
        self,
        requests: Frame,
        lookups: Frame,
        ops: Frame,
        block: Frame,
        who: Attribution,
        owner: Ints,
        devices: tuple[int, ...],
        rows_left_out: bool,
        start_ns: int,
    ) -> None:
        self.requests, self.lookups, self.ops, self.block = requests, lookups, ops, block
        self.who, self.owner, self.devices = who, owner, devices
        self.rows_left_out, self.start_ns = rows_left_out, start_ns
        op, request, share = who.pairs
        is_read = ops["kind"][op] < OpKind.WRITE
        self.op, self.share = op[is_read], share[is_read]
        self.pairs_of = _Groups(request[is_read])
        self.rows_of = _Groups(owner)
        self.lookups_of = _Groups(who.lookup_request)
        reading = (block["op"] == 0) & (block["queued_ns"] >= 0)
        reading &= np.isin(block["device"], devices)
        self.busy = intervals.union(block["queued_ns"][reading], block["done_ns"][reading])

    def activity(self, request: int) -> spans.Activity:
        """What request number ``request`` did on storage."""
        pairs = self.pairs_of[request]
        reads = self.op[pairs]
        rows = self.rows_of.of(reads)
        looked = self.lookups_of[request]
        ops, block = self.ops, self.block
        # blk-throttle holds a bio before its request exists: that wait is queueing, not software.
        queued = np.where(
            (block["held"][rows] == 1) & (block["queued_ns"][rows] >= 0),
            ops["start_ns"][self.owner[rows]],
            block["queued_ns"][rows],
        )
        return spans.Activity(
            lookup_start_ns=self.lookups["start_ns"][looked],
            lookup_end_ns=self.lookups["end_ns"][looked],
            read_start_ns=ops["start_ns"][reads],
            read_end_ns=ops["end_ns"][reads],
            read_bytes=ops["result"][reads],
            read_share=self.share[pairs],
            queued_ns=queued,
            issued_ns=block["issued_ns"][rows],
            done_ns=block["done_ns"][rows],
        )

    def known(self, column: str, request: int) -> int | None:
        """A requests column, None where it is unknown."""
        value = int(self.requests[column][request])
        return value if value >= 0 else None


def _account(join: _Join, files: KVFiles, request: int, unit_tokens: int | None) -> Account:
    """One request's account, before the routes are compared."""
    activity = join.activity(request)
    arrival, prefill_start, prefill_end, first_token = (
        int(join.requests[name][request])
        for name in ("arrival_ns", "prefill_start_ns", "prefill_end_ns", "first_token_ns")
    )
    cut, restore = None, None
    ttft = first_token - arrival if 0 <= arrival <= first_token else None
    doubt = join.known("uncertainty_ns", request)
    vague = doubt is not None and doubt > MOST_DOUBT * (ttft or 0)
    # What a request did before the window was not seen: its parts are unknown.
    whole = arrival < 0 or arrival >= join.start_ns
    if whole:
        milestones = (-1, -1, -1) if vague else (arrival, prefill_start, first_token)
        restore = spans.cut_restore(activity, *milestones, join.rows_left_out)
    if whole and ttft is not None and not vague:
        cut = spans.cut_ttft(arrival, prefill_start, prefill_end, first_token, activity)
    reads = len(activity.read_start_ns) > 0 and whole
    first_read = int(activity.read_start_ns.min()) if reads else None
    looked = join.lookups_of[request]
    stored = looked[join.lookups["result"][looked] >= 0]
    found = len(np.unique(files.lookup_key[stored]))
    return Account(
        id=str(join.requests["id"][request]),
        arrival_ns=arrival,
        ttft_ns=ttft,
        prompt_tokens=join.known("prompt_tokens", request),
        device_hit_tokens=join.known("device_hit_tokens", request),
        storage_hit_tokens=join.known("storage_hit_tokens", request),
        computed_tokens=join.known("computed_tokens", request),
        stored_tokens=found * unit_tokens if unit_tokens and len(looked) else None,
        spans=cut,
        restore=restore,
        recompute_ns=None,
        restore_estimate_ns=None,
        verdict=Verdict.UNKNOWN,
        gain_ns=None,
        attribution=_attribution(join, request),
        host_hit_tokens=join.known("host_hit_tokens", request),
        offload_hit_tokens=join.known("offload_hit_tokens", request),
        uncertainty_ns=doubt,
        vague=vague,
        first_read_ns=first_read,
        scheduled_ns=join.known("scheduled_ns", request),
        prefill_start_ns=join.known("prefill_start_ns", request),
        device_before_read_ns=_idle_before(join, join.known("arrival_ns", request), first_read),
    )


def _attribution(join: _Join, request: int) -> dict[str, float]:
    pairs = join.pairs_of[request]
    ops = join.op[pairs]
    amount = np.bincount(
        join.who.op_class[ops], join.ops["result"][ops] * join.share[pairs], len(CLASSES)
    )
    total = amount.sum()
    return dict(zip(CLASSES, (amount / total if total else amount).tolist(), strict=True))


def _idle_before(join: _Join, arrival: int | None, first_read: int | None) -> int | None:
    """Time between arrival and first read in which the KV device had no read outstanding."""
    if arrival is None or first_read is None or not join.devices:
        return None
    if first_read <= arrival:
        return 0
    starts, ends = join.busy
    near = slice(int(np.searchsorted(ends, arrival)), int(np.searchsorted(starts, first_read)))
    return first_read - arrival - intervals.covered(starts[near], ends[near], arrival, first_read)


def _kv_ops(ops: Frame, kv: Ints, files: KVFiles, who: Attribution) -> Frame:
    frame = {name: column[kv] for name, column in ops.items()}
    keys = np.array([*files.keys, None], object)
    return {
        **frame,
        "key": keys[files.op_key[kv]],
        "request": who.op_request[kv],
        "class": who.op_class[kv],
    }


def _seen(lookups: Frame, files: KVFiles, kv_ops: Frame) -> dict[str, int]:
    """Own figures of what engines count."""
    read = (kv_ops["kind"] < OpKind.WRITE) & (kv_ops["result"] > 0)
    tests = bursts.existence_tests(lookups, files)
    return {
        "read_bytes": int(kv_ops["result"][read].sum()),
        "chunk_hits": int((lookups["result"][tests] >= 0).sum()),
    }


def _bytes_by_class(kv_ops: Frame) -> dict[str, int]:
    read = (kv_ops["kind"] < OpKind.WRITE) & (kv_ops["result"] > 0)
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


def _bytes_per_token(engine: EngineFacts | None, accounts: list[Account]) -> float | None:
    """The engine's word, else the median of restored bytes over restored tokens."""
    if engine is not None:
        if engine.bytes_per_token:
            return float(engine.bytes_per_token)
        if engine.unit_bytes and engine.unit_tokens:
            return engine.unit_bytes / engine.unit_tokens
    ratios = [
        a.restore.bytes / a.storage_hit_tokens
        for a in accounts
        if a.restore and a.restore.bytes and a.storage_hit_tokens
    ]
    return float(np.median(ratios)) if ratios else None


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
