"""Where the time of commands goes: driver, wire and target, receive, completion.

A command passes up to four points after its set-up: sent, the first sign of its answer, the
driver's completion, the block layer's. Where a transport or a kernel lacks a stamp, the segments
on both of its sides are one, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import SEGMENTS, Segment
from kvprobe.model import Frame, Missing
from kvprobe.schema import NvmeTransport

Ints = NDArray[np.int64]

STAMPS = ("sent_ns", "arrived_ns", "done_ns", "end_ns")
"""Ends of ``SEGMENTS``, in order."""
MOST = 0.5
"""Share of the commands that must have a stamp for it to divide them."""
_HOOKS: dict[tuple[int, str], tuple[str, ...]] = {
    (NvmeTransport.TCP, "sent_ns"): ("nvme_tcp_try_send",),
    (NvmeTransport.TCP, "arrived_ns"): ("sk_data_ready", "nvme_tcp_data_ready"),
    (NvmeTransport.RDMA, "sent_ns"): ("nvme_rdma_post_send",),
    (NvmeTransport.RDMA, "arrived_ns"): ("nvme_rdma_recv_done",),
}
"""Hooks of the probe ``nvme`` that stamp, as ``Missing.what`` names them."""


def division(rows: Frame, missing: Sequence[Missing] = ()) -> tuple[Segment, ...]:
    """The segments of these commands in order; empty without commands that can be divided.

    Args:
        rows: commands that have ``nvme`` rows (see ``commands.commands``).
        missing: what this machine does not show, for the reason of a merged segment.
    """
    start, done = rows["start_ns"], rows["done_ns"]
    whole = (start >= 0) & (done >= start)
    if not whole.any():
        return ()
    known = {name: whole & (rows[name] >= 0) for name in STAMPS}
    used = [name for name in STAMPS if known[name].sum() >= MOST * whole.sum()]
    complete = np.logical_and.reduce([known[name] for name in used])
    edges = [start, *(rows[name] for name in used)]
    times = np.stack([edge[complete] for edge in edges])
    # Stamps of several processors can be a little out of order: no stretch is shorter than 0.
    stretches = np.diff(np.maximum.accumulate(times, axis=0), axis=0)
    if not stretches.size:
        return ()
    total = int(stretches.sum())
    found, first = [], 0
    for name, stretch in zip(used, stretches, strict=True):
        last = STAMPS.index(name) + 1
        parts = SEGMENTS[first:last]
        first = last
        mid, p95 = np.quantile(stretch, [0.5, 0.95]).tolist()
        own = int(stretch.sum())
        why = _why(rows, parts, missing) if len(parts) > 1 else ""
        share = own / total if total else 0.0
        found.append(Segment(parts, own, share, mid, p95, int(stretch.size), why))
    return tuple(found)


def _why(rows: Frame, parts: tuple[str, ...], missing: Sequence[Missing]) -> str:
    transports = rows["transport"]
    most = int(np.bincount(transports[transports >= 0], minlength=1).argmax())
    if most in (NvmeTransport.PCI, NvmeTransport.LOOP):
        return "driver and device share memory, so there is no sending and no arrival"
    stamps = [STAMPS[SEGMENTS.index(part)] for part in parts[:-1]]
    hooks = [hook for stamp in stamps for hook in _HOOKS.get((most, stamp), ())]
    reasons = [
        f"{each.what}: {each.why}" for each in missing if any(hook in each.what for hook in hooks)
    ]
    return "; ".join(dict.fromkeys(reasons)) or "these stamps were not recorded"
