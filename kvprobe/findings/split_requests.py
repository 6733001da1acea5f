"""One read of the engine is cut into many small commands by a limit below it.

Only direct reads: of buffered ones the page cache decides the size. A cut into large pieces costs
next to nothing, so that only small ones are a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._storage import at_stake, device_share, restoring, storage_name
from kvprobe.findings._weigh import MIN_REQUESTS, confidence, severity
from kvprobe.model import DeviceFacts, Evidence, Finding
from kvprobe.schema import OpKind

MIN_READS = 30
MIN_PIECES = 4.0
"""Commands a read: two or three come from where a read begins, not from how it is cut."""
CERTAIN_PIECES = 16.0
SMALL_BYTES = 128 << 10
"""Below it a command's fixed cost (5 to 20 us of processor time and round trip) is as much as
moving its bytes at some GB/s; drives whose limit is 128 KiB are common and reach their rate."""
SAME_SHARE = 0.5
"""Most pieces have one size: that is a limit, and no accident of layout."""
ALIGNED_SHARE = 0.9
"""Of the cuts at multiples of the size, which a boundary makes and a largest size does not."""
CUTS = "the limit that does it: "
_SECTOR_BYTES = 512
_SETTINGS = {
    "max_sectors_kb": 1 << 10,
    "max_hw_sectors_kb": 1 << 10,
    "chunk_sectors": _SECTOR_BYTES,
    "max_segments": 4096,
}
"""Settings that cut, with their unit in bytes; a segment is a page in the worst case."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Cut:
    """Direct reads and their pieces: rows of ``block``, pieces of each read, time at the end."""

    rows: Ints
    reads: int
    pieces: float
    size: int
    size_share: float
    spread: float


def _detect(ledger: Ledger) -> list[Finding]:
    requests = restoring(ledger)
    cut = _cut(ledger)
    if cut is None or len(requests) < MIN_REQUESTS or cut.reads < MIN_READS:
        return []
    if cut.pieces < MIN_PIECES or cut.size >= SMALL_BYTES or cut.size_share < SAME_SHARE:
        return []
    commands = sum(r.restore.commands for r in requests)
    device = device_share(requests)
    name, value = _limit(ledger, cut)
    return [
        Finding(
            slug="split_requests",
            severity=severity(
                None if device is None else at_stake(requests, device * cut.spread)
            ),
            confidence=confidence(cut.reads, cut.pieces, MIN_PIECES, CERTAIN_PIECES),
            subject=storage_name(ledger),
            evidence=(
                Evidence("commands a read, mean", cut.pieces, "", cut.reads),
                Evidence("size of most pieces", cut.size, "B", len(cut.rows)),
                Evidence("share of the pieces of that size", cut.size_share, "share",
                         len(cut.rows)),
                Evidence(name, value, "B", len(cut.rows)),
                Evidence("commands a restore, mean", commands / len(requests), "", len(requests)),
                Evidence("share of a read between its first and its last piece, median",
                         cut.spread, "share", cut.reads),
            ),
            would_disprove="a larger limit with which reads take as long and cost as much "
            "processor time",
        )
    ]  # fmt: skip


def _cut(ledger: Ledger) -> _Cut | None:
    """The pieces of direct reads that have all of their rows; None without any."""
    ops, block = ledger.ops, ledger.block
    if not block or not len(ops["kind"]):
        return None
    direct = (ops["kind"] < OpKind.WRITE) & (ops["result"] > 0) & (ops["direct"] == 1)
    owner = block["owner"]
    mine = (owner >= 0) & (block["op"] == 0) & direct[np.maximum(owner, 0)]
    number = np.bincount(owner[mine], minlength=len(direct))
    moved = np.bincount(owner[mine], block["bytes"][mine], len(direct))
    whole = direct & (number > 0) & (moved == ops["result"])
    rows = np.flatnonzero(mine & whole[np.maximum(owner, 0)])
    if not len(rows):
        return None
    several = rows[number[owner[rows]] > 1]
    if not len(several):
        return None
    sizes, counts = np.unique(block["bytes"][several], return_counts=True)
    first = np.full(len(direct), np.iinfo(np.int64).max)
    last = np.full(len(direct), -1, np.int64)
    np.minimum.at(first, owner[rows], block["done_ns"][rows])
    np.maximum.at(last, owner[rows], block["done_ns"][rows])
    took = np.maximum(ops["end_ns"] - ops["start_ns"], 1)[whole]
    return _Cut(
        rows=several,
        reads=int(whole.sum()),
        pieces=float(number[whole].mean()),
        size=int(sizes[counts.argmax()]),
        size_share=float(counts.max() / len(several)),
        spread=float(np.median((last - first)[whole] / took)),
    )


def _limit(ledger: Ledger, cut: _Cut) -> tuple[str, float | None]:
    """The limit that cuts at this size, as far as it is known."""
    limits = _limits(ledger)
    for name, value in limits:
        if value == cut.size:
            return f"{CUTS}{name}", float(value)
    if _is_aligned(ledger, cut):
        return "no limit is that small; cuts are at multiples of", float(cut.size)
    smallest = min(limits, key=lambda limit: limit[1], default=None)
    if smallest is None:
        return "limits of the disks are not known; cuts are after", float(cut.size)
    return f"no limit is that small; the smallest is {smallest[0]}", float(smallest[1])


def _limits(ledger: Ledger) -> list[tuple[str, int]]:
    """Largest requests by setting and disk, in the order in which they cut."""
    disks: list[DeviceFacts] = []
    for device in ledger.kv_devices:
        disks += [facts for facts in (device.head_facts, device.facts) if facts is not None]
    found = [
        (f"max_sectors_kb of {facts.name}", facts.max_request_bytes)
        for facts in disks
        if facts.max_request_bytes
    ]
    names = dict.fromkeys(
        name for d in ledger.kv_devices for name in (d.head, d.facts.name) if name is not None
    )
    for setting, unit in _SETTINGS.items():
        for disk in names:
            value = _setting(ledger, setting, disk)
            if value:
                found.append((f"{setting} of {disk}", value * unit))
    return list(dict.fromkeys(found))


def _setting(ledger: Ledger, name: str, disk: str) -> int | None:
    """A whole number in the table ``knobs``; None where it is unknown."""
    knobs = ledger.knobs
    if not knobs:
        return None
    rows = np.flatnonzero((knobs["name"] == name) & (knobs["subject"] == disk))
    text = knobs["value"][rows[0]] if len(rows) else None
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _is_aligned(ledger: Ledger, cut: _Cut) -> bool:
    """Whether reads are cut at multiples of the size, which a boundary does and no largest size."""
    block = ledger.block
    end = block["sector"][cut.rows] * _SECTOR_BYTES + block["bytes"][cut.rows]
    owner = block["owner"][cut.rows]
    # The last piece of a read ends where the read does; cuts are the ends of the others.
    order = np.lexsort((end, owner))
    inner = order[:-1][np.diff(owner[order]) == 0]
    return len(inner) > 0 and float((end[inner] % cut.size == 0).mean()) >= ALIGNED_SHARE


DETECTOR = Detector("split_requests", "a read is cut into many small commands", _detect)
