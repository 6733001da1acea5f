"""One request's account: what it did on storage, cut into spans, before routes are compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator import intervals, spans
from kvprobe.correlator.attribute import Attribution
from kvprobe.correlator.identify import KVFiles
from kvprobe.correlator.ledger import CLASSES, Account
from kvprobe.model import Frame, Verdict
from kvprobe.schema import OpKind

Ints = NDArray[np.int64]

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


class Join:
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
        window_ns: tuple[int, int],
    ) -> None:
        self.requests, self.lookups, self.ops, self.block = requests, lookups, ops, block
        self.who, self.owner, self.devices = who, owner, devices
        self.rows_left_out = rows_left_out
        self.start_ns, self.end_ns = window_ns
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


def account(join: Join, files: KVFiles, request: int, unit_tokens: int | None) -> Account:
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
    # What a request did before or after the window was not seen: its parts are unknown.
    whole = (arrival < 0 or arrival >= join.start_ns) and first_token <= join.end_ns
    # With vague times the reads of others are among those that it may have waited for.
    whole &= not vague
    if whole:
        milestones = (arrival, prefill_start, first_token)
        restore = spans.cut_restore(activity, *milestones, join.rows_left_out)
    if whole and ttft is not None:
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


def _attribution(join: Join, request: int) -> dict[str, float]:
    pairs = join.pairs_of[request]
    ops = join.op[pairs]
    amount = np.bincount(
        join.who.op_class[ops], join.ops["result"][ops] * join.share[pairs], len(CLASSES)
    )
    total = amount.sum()
    return dict(zip(CLASSES, (amount / total if total else amount).tolist(), strict=True))


def _idle_before(join: Join, arrival: int | None, first_read: int | None) -> int | None:
    """Time between arrival and first read in which the KV device had no read outstanding."""
    if arrival is None or first_read is None or not join.devices:
        return None
    if first_read <= arrival:
        return 0
    starts, ends = join.busy
    near = slice(int(np.searchsorted(ends, arrival)), int(np.searchsorted(starts, first_read)))
    return first_read - arrival - intervals.covered(starts[near], ends[near], arrival, first_read)
