"""GPUDirect Storage: which operations are cuFile's, by which path their bytes came, what was seen.

A call of libcufile is an operation of the engine. In compatibility mode the library serves it with
system calls of its own, in other threads too: an operation of the same process, file and direction
that lies within a call's time and meets its range is *below* the call, and is counted there, not a
second time. A transfer of a stream has a row of when it was handed over only; it is
counted here and nowhere else, as what the library reads for it has rows of its own. So has one of a
batch, and a second row when the process was told that it is done: that one is a call like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvprobe import units
from kvprobe.capture.frames import select
from kvprobe.correlator.counters import rises
from kvprobe.correlator.identify import last_not_after
from kvprobe.model import Frame
from kvprobe.schema import CUFILE_CALLS, CUFILE_HANDED_OVER, UNKNOWN, OpKind

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

CANDIDATES = 64
"""Calls on one file looked at per operation, newest first: more than a process keeps open on it."""
NEARLY_ALL = 0.9
"""Share of the bytes from which one path is said to have carried them."""
MOST = 0.5
_PEER_TO_PEER = "properties.use_pci_p2pdma"
"""The setting of cufile.json, as ``kvprobe.knobs`` names it."""


class DataPath(StrEnum):
    """How the bytes of cuFile calls travelled."""

    NATIVE = "native"
    """Straight into GPU memory."""
    COMPAT = "compat"
    """Compatibility mode: read into host memory by system calls, then copied."""
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Transfers:
    """Reads, or writes, through libcufile.

    ``calls`` are those that transferred ``bytes``; ``failed`` ended with an error. ``nameless``
    are those whose file is not known, because the handle is older than the recording; what lies
    below them cannot be told, so the three after them are of the others. ``below`` are the system
    calls by which the library served them, ``block`` the block requests; ``unseen`` is what had
    neither. ``block`` and ``unseen`` are None where block rows were left out. ``handed_over`` are
    transfers of streams and batches of which nobody told that they were done: how many and what
    they asked for is all that is known.
    """

    calls: int
    bytes: int
    failed: int
    nameless_calls: int
    nameless_bytes: int
    below_ops: int
    below_bytes: int
    block_requests: int | None
    block_bytes: int | None
    unseen_calls: int | None
    unseen_bytes: int | None
    handed_over: int
    handed_over_bytes: int

    @property
    def named_bytes(self) -> int:
        """Bytes of calls whose file is known."""
        return self.bytes - self.nameless_bytes


@dataclass(frozen=True)
class Driver:
    """What the kernel module nvidia-fs counted over the window, for all processes.

    ``loaded`` None: nobody looked. Counts are None where its statistics are off, as they are
    unless somebody switches them on; bytes have a resolution of 1 MiB.
    """

    loaded: bool | None
    reads: int | None = None
    read_bytes: int | None = None
    writes: int | None = None
    write_bytes: int | None = None
    errors: int | None = None


@dataclass(frozen=True)
class GpuDirect:
    """GPUDirect Storage over a window; ``why`` says what ``path`` rests on."""

    path: DataPath
    why: str
    reads: Transfers
    writes: Transfers
    driver: Driver


@dataclass(frozen=True)
class Layers:
    """The table ``ops``, and of it what an engine itself asked for.

    ``counts_for`` is for each row of ``every`` the index of the row of ``ops`` that it counts for:
    itself, or the call that it is below; -1 for transfers that were only handed over. ``below`` is
    the index in ``every`` of the call that a row is below, or -1.
    """

    every: Frame
    ops: Frame
    counts_for: Ints
    below: Ints

    def owner(self, owner: Ints) -> Ints:
        """Indices into ``every`` (or -1) as indices into ``ops``."""
        return np.append(self.counts_for, -1)[owner]


def layers(every: Frame) -> Layers:
    """Tell operations of the engine from those that libcufile makes for them."""
    count = len(every["start_ns"])
    below = _below(every)
    top = (below < 0) & ~np.isin(every["kind"], CUFILE_HANDED_OVER)
    counts_for = np.where(top, np.cumsum(top) - 1, -1)
    inner = np.flatnonzero(below >= 0)
    counts_for[inner] = counts_for[below[inner]]
    calls = np.isin(every["kind"], CUFILE_CALLS)
    if top.all() and not calls.any():
        return Layers(every, every, counts_for, below)
    # Whatever the file was opened with, only what the library reads itself passes the page cache.
    buffered = np.zeros(count, bool)
    buffered[below[inner[every["direct"][inner] == 0]]] = True
    direct = np.where(calls, ~buffered, every["direct"])
    return Layers(every, select({**every, "direct": direct}, top), counts_for, below)


def _below(ops: Frame) -> Ints:
    """For each operation the cuFile call that it is below, or -1."""
    found = np.full(len(ops["start_ns"]), -1, np.int64)
    named = ops["inode"] != UNKNOWN
    calls = np.flatnonzero(np.isin(ops["kind"], CUFILE_CALLS) & named)
    inner = np.flatnonzero(~np.isin(ops["kind"], (*CUFILE_CALLS, *CUFILE_HANDED_OVER)) & named)
    if not len(calls) or not len(inner):
        return found
    writes = ops["kind"] >= OpKind.WRITE
    identity = np.stack([ops["tgid"], ops["fs_device"], ops["inode"], writes], axis=1)
    _, group = np.unique(identity, axis=0, return_inverse=True)
    group = group.reshape(-1)
    order = calls[np.lexsort((ops["start_ns"][calls], group[calls]))]
    start, end = ops["start_ns"], ops["end_ns"]
    place = last_not_after(group[order], start[order], group[inner], start[inner])
    for _ in range(CANDIDATES):
        alive = np.flatnonzero(place >= 0)
        alive = alive[group[order[place[alive]]] == group[inner[alive]]]
        if not len(alive):
            break
        op, call = inner[alive], order[place[alive]]
        inside = (end[op] <= end[call]) & _meet(ops, op, call)
        found[op[inside]] = call[inside]
        place[alive] -= 1
        rest = np.ones(len(place), bool)
        rest[alive[~inside]] = False
        place[rest] = -1
    return found


def _meet(ops: Frame, one: Ints, other: Ints) -> Flags:
    """Whether the ranges asked for have bytes in common."""
    low = np.maximum(ops["offset"][one], ops["offset"][other])
    high = np.minimum(
        ops["offset"][one] + ops["requested"][one], ops["offset"][other] + ops["requested"][other]
    )
    known = (ops["offset"][one] >= 0) & (ops["offset"][other] >= 0)
    meet: Flags = known & (low < high)
    return meet


def account(
    found: Layers,
    block: Frame,
    owner: Ints,
    host: Frame,
    knobs: Frame,
    rows_left_out: bool,
) -> GpuDirect | None:
    """What went through libcufile in a window; None where nothing did.

    Args:
        found: the operations.
        block: frame of ``block``.
        owner: for each block row the operation it belongs to, as an index into ``found.ops``.
        host: frame of ``host``.
        knobs: frame of ``knobs``.
        rows_left_out: whether block rows are missing on purpose.
    """
    if not np.isin(found.every["kind"], (*CUFILE_CALLS, *CUFILE_HANDED_OVER)).any():
        return None
    reads, writes = (
        _transfers(found, block, owner, writing, rows_left_out) for writing in (False, True)
    )
    driver = _driver(host)
    inner = found.below >= 0
    direct = inner.any() and bool((found.every["direct"][inner] == 1).all())
    path, why = _path(reads, writes, driver, bool(direct and _peer_to_peer(knobs)))
    return GpuDirect(path, why, reads, writes, driver)


def _transfers(
    found: Layers, block: Frame, owner: Ints, writing: bool, rows_left_out: bool
) -> Transfers:
    every, result = found.every, found.every["result"]
    of_kind = (every["kind"] >= OpKind.WRITE) == writing
    calls = np.isin(every["kind"], CUFILE_CALLS) & of_kind
    done = calls & (result > 0)
    nameless = done & (every["inode"] == UNKNOWN)
    handed = np.isin(every["kind"], CUFILE_HANDED_OVER) & of_kind
    told = np.isin(every["kind"], (OpKind.CUFILE_READ_DONE, OpKind.CUFILE_WRITE_DONE)) & of_kind
    inner = np.flatnonzero((found.below >= 0) & of_kind)
    below_bytes = np.zeros(len(result), np.int64)
    np.add.at(below_bytes, found.below[inner], np.maximum(result[inner], 0))
    # Requests of each call, by its index in the whole table.
    row_of = np.flatnonzero((found.below < 0) & (found.counts_for >= 0))
    rows = np.flatnonzero((owner >= 0) & (block["op"] == int(writing)))
    mine = row_of[owner[rows]] if len(row_of) else rows
    served = np.zeros(len(result), np.int64)
    np.add.at(served, mine, block["bytes"][rows])
    named = done & ~nameless
    unseen = named & (below_bytes == 0) & (served == 0)
    return Transfers(
        calls=int(done.sum()),
        bytes=int(result[done].sum()),
        failed=int(((calls | handed) & (result < 0)).sum()),
        nameless_calls=int(nameless.sum()),
        nameless_bytes=int(result[nameless].sum()),
        below_ops=int(named[found.below[inner]].sum()),
        below_bytes=int(np.minimum(below_bytes, result)[named].sum()),
        block_requests=None if rows_left_out else int(named[mine].sum()),
        block_bytes=None if rows_left_out else int(np.minimum(served, result)[named].sum()),
        unseen_calls=None if rows_left_out else int(unseen.sum()),
        unseen_bytes=None if rows_left_out else int(result[unseen].sum()),
        # A batch that began before the recording may be told to be done in it.
        handed_over=max(0, int((handed & (result >= 0)).sum() - told.sum())),
        handed_over_bytes=max(
            0,
            int(every["requested"][handed & (result >= 0)].sum() - every["requested"][told].sum()),
        ),
    )


def _driver(host: Frame) -> Driver:
    if not host or not len(host["metric"]):
        return Driver(None)
    grown = dict(_grown(host))
    errors = [grown[name] for name in ("gds_read_errors", "gds_write_errors") if name in grown]
    return Driver(
        loaded=bool((host["metric"] == "gds_driver").any()),
        reads=grown.get("gds_reads"),
        read_bytes=grown.get("gds_read_bytes"),
        writes=grown.get("gds_writes"),
        write_bytes=grown.get("gds_write_bytes"),
        errors=sum(errors) if errors else None,
    )


def _grown(host: Frame) -> Iterator[tuple[str, int]]:
    """How far each counter of the driver rose; one that was reset goes on from 0."""
    for name in ("reads", "read_bytes", "read_errors", "writes", "write_bytes", "write_errors"):
        rows = np.flatnonzero(host["metric"] == f"gds_{name}")
        if len(rows) > 1:
            values = host["value"][rows[np.argsort(host["time_ns"][rows], kind="stable")]]
            yield f"gds_{name}", int(rises(values).sum())


def _peer_to_peer(knobs: Frame) -> bool:
    """Whether cufile.json has the library map GPU memory and read into it by direct I/O."""
    if not knobs:
        return False
    values = knobs["value"][knobs["name"] == _PEER_TO_PEER]
    return any(str(value).lower() == "true" for value in values)


def _path(
    reads: Transfers, writes: Transfers, driver: Driver, peer_to_peer: bool
) -> tuple[DataPath, str]:
    """The path that most bytes took, and what says so.

    ``peer_to_peer``: the library's system calls may go straight to GPU memory.
    """
    whole = reads.named_bytes + writes.named_bytes
    if not whole:
        return DataPath.UNKNOWN, _nothing_known(reads, writes)
    below = reads.below_bytes + writes.below_bytes
    if below > (1 - NEARLY_ALL) * whole and peer_to_peer:
        why = f"direct system calls of the library served {units.share(below / whole)} of the bytes"
        return DataPath.UNKNOWN, f"{why}: compatibility mode, or PCI peer-to-peer DMA, which is on"
    if below >= NEARLY_ALL * whole:
        why = f"system calls of the library served {units.share(below / whole)} of the bytes"
        return DataPath.COMPAT, why
    if below > (1 - NEARLY_ALL) * whole:
        why = f"system calls of the library served {units.share(below / whole)} of the bytes"
        return DataPath.MIXED, f"{why}, the others came past them"
    counted = (driver.read_bytes or 0) + (driver.write_bytes or 0)
    if counted >= MOST * whole:
        return DataPath.NATIVE, f"the driver nvidia-fs counted {units.size(counted)}"
    served = (reads.block_bytes or 0) + (writes.block_bytes or 0)
    if served >= MOST * whole:
        why = f"block requests for {units.share(served / whole)} of the bytes, and no system call"
        return DataPath.NATIVE, why
    if reads.block_bytes is None:
        return DataPath.UNKNOWN, "no system call was seen, and block rows were left out"
    why = "neither a system call nor a block request was seen for most bytes"
    if driver.loaded:
        return DataPath.UNKNOWN, f"{why}, and the driver nvidia-fs has not counted them"
    known = "and nvidia-fs is not loaded" if driver.loaded is False else "nvidia-fs was not asked"
    return DataPath.UNKNOWN, f"{why}, {known}"


def _nothing_known(reads: Transfers, writes: Transfers) -> str:
    if reads.nameless_calls + writes.nameless_calls:
        return "the handles are older than the recording: which files they stand for is not known"
    if reads.handed_over + writes.handed_over:
        return "transfers of streams and batches are only seen when they are handed over"
    return "no call transferred anything"
