"""A running collection: load the probes, attach them, read rows, counts and cost, detach.

Used as ``with open_session(["block", "ops"], Filters(root="/mnt/kv")) as session: ...`` with a
``session.poll()`` every 20 ms or so.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from kvprobe import schema
from kvprobe.bpf import attach, catalog, maps, planning, processes
from kvprobe.bpf.aggregates import Aggregates
from kvprobe.bpf.compose import FILTERS, Hook
from kvprobe.bpf.cost import CostMeter
from kvprobe.bpf.governor import Governor, Thinning
from kvprobe.bpf.loaded import Loaded
from kvprobe.bpf.ring import Ring
from kvprobe.bpf.roots import Root, packed_file, packed_prefix, read_root
from kvprobe.errors import KvprobeError
from kvprobe.model import Filters, Loss, Missing, ProgramCost, Rows

_BLOCK_SLOTS = (65536, 8)
"""Entries of the map ``block_slots`` and 64-bit words of each, the first being its key or 0."""
_ONE = struct.pack("=I", 1)


def open_session(
    probes: Sequence[str] | None,
    filters: Filters,
    loader: str = "auto",
    ring_bytes: int | None = None,
    budget_share: float | None = None,
) -> Session:
    """Start collecting.

    Args:
        probes: names of probes, None for all.
        filters: what the kernel keeps.
        loader: ``core``, ``bcc``, or ``auto`` for the first of these that works.
        ring_bytes: size of every ring buffer; None for each probe's own default.
        budget_share: what the governor keeps to (see ``governor.BUDGET_SHARE``); None: no governor.

    Raises:
        KvprobeError: no right to use BPF, no such probe, loader or root, or nothing loads.
    """
    if ring_bytes is not None and not catalog.is_ring_size(ring_bytes):
        raise KvprobeError(
            f"ring size {ring_bytes} is no power of two of whole pages", "try 16777216"
        )
    if filters.keep_one_in < 1:
        raise KvprobeError("keep_one_in must be at least 1", "1 keeps every row")
    for tgid in filters.tgids:
        if not os.path.isdir(f"/proc/{tgid}"):
            raise KvprobeError(f"no process {tgid}", "processes and their ids: ps -ef")
    chosen = catalog.choose(probes)
    if not chosen:
        raise KvprobeError("no probe was chosen", f"there are: {', '.join(catalog.available())}")
    # Everything lies below the root of all.
    root = read_root(filters.root) if filters.root and filters.root != "/" else None
    prepared = planning.prepare(chosen, filters, root, loader, ring_bytes)
    session = Session(filters, root, prepared)
    try:
        session._start(prepared.probes, ring_bytes, budget_share)
    except BaseException:
        session.close()
        raise
    return session


class Session:
    """Made by ``open_session``.

    Attributes:
        loader: ``core`` or ``bcc``.
        loader_why: why ``auto`` did not take ``core``; empty where it did.
        attached: probe name -> the events it is attached to.
        missing: what this machine lacks.
        unresolved: relative paths whose process was gone before they could be placed.
    """

    def __init__(self, filters: Filters, root: Root | None, prepared: planning.Prepared) -> None:
        self.loader = prepared.loaded.loader
        self.loader_why = prepared.why
        self.attached: dict[str, list[str]] = {}
        self.missing: tuple[Missing, ...] = (
            *prepared.missing,
            *(root.missing if root else ()),
            *planning.namespace_notice(),
        )
        self._filters = filters
        self._root = root
        self._loaded: Loaded | None = prepared.loaded
        self._hooks = prepared.offer.hooks
        self._libraries = prepared.offer.libraries
        self._counters = {name: index for index, name in enumerate(prepared.source.counters)}
        self._links: list[int] = []
        self._rings: dict[str, Ring] = {}
        self._seeds: Rows | None = None
        self.unresolved = 0
        self._start_ns = 0
        self._losses: dict[str, Loss] = {}
        self._aggregates: Aggregates | None = None
        self._governor: Governor | None = None
        self._meter = CostMeter(prepared.loaded.programs)

    # ------------------------------------------------------------ reading

    def poll(self) -> dict[str, Rows]:
        """Rows that arrived since the last call, per table; never blocks.

        Raises:
            KvprobeError: a ring buffer is damaged.
        """
        now_ns = time.monotonic_ns()
        self._meter.tick(now_ns)
        if self._governor and self._governor.is_due(now_ns):
            loss = self.losses()[schema.BLOCK.name]
            requests = loss.rows + loss.lost + loss.thinned
            self._governor.update(now_ns, time.process_time_ns(), requests, loss.lost)
        rows = {name: ring.drain() for name, ring in self._rings.items()}
        if schema.LOOKUPS.name in rows:
            rows[schema.LOOKUPS.name] = self._resolved(rows[schema.LOOKUPS.name])
        return rows

    def aggregates(self) -> dict[str, Rows]:
        """Rows of ``depth`` and ``histogram`` for the time since the last call."""
        return self._aggregates.read(time.monotonic_ns()) if self._aggregates else {}

    def losses(self) -> dict[str, Loss]:
        """How complete each kernel table is, by the kernel's own counts; stays after ``close``."""
        for name, ring in self._rings.items():
            lost, thinned = self.counter(f"lost_{name}"), self.counter(f"thinned_{name}")
            self._losses[name] = Loss(ring.rows, lost, thinned)
        return dict(self._losses)

    def counter(self, name: str) -> int:
        """One counter of the kernel side (``COUNT(name, n)`` in a probe); 0 if it has none."""
        if self._loaded is None or name not in self._counters:
            return 0
        return maps.per_cpu_u64(self._loaded.maps["counters"], self._counters[name])

    def in_flight(self) -> dict[str, int]:
        """Per table, what has begun and not ended: these rows are neither delivered nor lost."""
        found = {}
        if self._loaded and schema.BLOCK.name in self._rings:
            slots = maps.array_words(self._loaded.maps["block_slots"], *_BLOCK_SLOTS)
            spilled = sum(1 for _ in maps.keys(self._loaded.maps["block_spill"], 8))
            found["block"] = int(np.count_nonzero(slots[:, 0])) + spilled
        if "ops" in self._rings:
            ended = self.counter("ops_ended")  # first: what begins and ends meanwhile cancels
            found["ops"] = self.counter("ops_begun") - ended
        return found

    def cost(self) -> tuple[ProgramCost, ...]:
        """Runs and net run time of each program within the measured windows.

        Empty where the kernel has no run-time statistics. ``measured_ns`` says how long the
        windows were.
        """
        return self._meter.costs()

    @property
    def measured_ns(self) -> int:
        """For how long ``cost`` was measured."""
        return self._meter.measured_ns

    @property
    def thinnings(self) -> tuple[Thinning, ...]:
        """What the governor did."""
        return tuple(self._governor.changes) if self._governor else ()

    # ------------------------------------------------------------ control

    def set_keep_one_in(self, count: int) -> None:
        """Keep one block row in ``count`` from now on; the others are counted as thinned."""
        if self._loaded:
            maps.update(
                self._loaded.maps["control"],
                struct.pack("=I", 0),
                struct.pack("=QQ", count, self._start_ns),
            )

    def detach(self) -> None:
        """Stop collecting; what has been collected can still be read. May be called twice."""
        links, self._links = self._links, []
        attach.detach(reversed(links))

    def close(self) -> None:
        """Detach everything and free it; may be called twice."""
        self.detach()
        self._meter.stop(time.monotonic_ns())
        self.losses()
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._aggregates = None
        if self._loaded:
            self._loaded.close()
            self._loaded = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ starting

    def _start(
        self, probes: tuple[catalog.Probe, ...], ring_bytes: int | None, budget_share: float | None
    ) -> None:
        assert self._loaded
        for probe in probes:
            table = schema.TABLES[probe.table]
            # Else none of the probe's events is there; or another probe fills that table as well.
            if table.name in self._loaded.maps and table.name not in self._rings:
                size = ring_bytes or probe.ring_bytes
                self._rings[table.name] = Ring.of_map(table, self._loaded.maps[table.name], size)
        self._fill_roots(self._loaded)
        self._attach([hook for hook in self._hooks if hook.probe == FILTERS], self._loaded)
        self._fill_targets(self._loaded)
        self._start_ns = time.monotonic_ns()
        self.set_keep_one_in(self._filters.keep_one_in)
        self._attach([hook for hook in self._hooks if hook.probe != FILTERS], self._loaded)
        if schema.BLOCK.name in self._rings:
            self._aggregates = Aggregates(self._loaded.maps, self._start_ns)
        if budget_share is not None and schema.BLOCK.name in self._rings:
            self._governor = Governor(self.set_keep_one_in, self._filters.keep_one_in, budget_share)

    def _attach(self, hooks: Sequence[Hook], loaded: Loaded) -> None:
        """Last events of a row first, so that no row begins that cannot end."""
        for hook in reversed(hooks):
            program = loaded.programs[hook.name]
            if hook.kind == "raw":
                self._links.append(attach.attach_raw_tracepoint(program, hook.event))
            elif hook.is_function:
                self._links.append(attach.attach_function(program, hook.event, hook.is_return))
            elif hook.is_library:
                self._links += self._attach_library(program, hook)
            else:
                self._links.append(attach.attach_tracepoint(program, "syscalls", hook.label))
            events = self.attached.setdefault(hook.probe, [])
            if hook.label not in events:
                events.insert(0, hook.label)

    def _attach_library(self, program: int, hook: Hook) -> list[int]:
        """One link for each file of the library that has the function and is still there."""
        links = []
        for library in self._libraries.get(hook.probe, ()):
            offset = library.functions.get(hook.event)
            if offset is None:
                continue
            try:
                links.append(attach.attach_library(program, library.path, offset, hook.is_return))
            except KvprobeError as error:
                gone = Missing(library.name, error.message, f"calls of {hook.event} in it")
                self.missing = (*self.missing, gone)
        return links

    def _fill_roots(self, loaded: Loaded) -> None:
        if self._root is None:
            return
        for device, inode, what in self._root.entries:
            maps.update(loaded.maps["roots"], packed_file(device, inode), struct.pack("=I", what))
        if "lookups_prefixes" in loaded.maps:
            for index, prefix in enumerate(self._root.prefixes):
                maps.update(
                    loaded.maps["lookups_prefixes"], struct.pack("=I", index), packed_prefix(prefix)
                )

    def _fill_targets(self, loaded: Loaded) -> None:
        """The processes, their descendants and their open files. Forks are followed already."""
        tgids = set(self._filters.tgids)
        while tgids:
            for tgid in tgids:
                maps.update(loaded.maps["targets"], processes.packed_tgid(tgid), _ONE)
            known = {struct.unpack("=I", key)[0] for key in maps.keys(loaded.maps["targets"], 4)}
            tgids = processes.descendants(known) - known
        if self._filters.tgids:
            watched = [struct.unpack("=I", key)[0] for key in maps.keys(loaded.maps["targets"], 4)]
        elif self._root:
            watched = processes.everyone()
        else:
            return
        files = list(processes.open_files(watched, self._root))
        if self._filters.tgids and self._root is None:
            for file in files:
                maps.update(loaded.maps["traffic"], packed_file(file.device, file.inode), _ONE)
        self._seeds = processes.already_open_rows(files)

    def _resolved(self, rows: Rows) -> Rows:
        """Relative paths made absolute; rows that then lie outside of the root left out."""
        if self._seeds is not None:
            self._rings[schema.LOOKUPS.name].rows += len(self._seeds)
            rows, self._seeds = np.concatenate((self._seeds, rows)), None
        if not len(rows):
            return rows
        first = rows["path"].astype("S1")
        keep = np.ones(len(rows), bool)
        for index in np.flatnonzero(first != b"/"):
            row = rows[index]
            path = processes.resolve(row)
            if path is not None:
                encoded = path.encode("utf-8", "surrogateescape")
                row["path"] = encoded[: schema.PATH_BYTES - 1]
                row["cut"] |= len(encoded) >= schema.PATH_BYTES
            inside = path is not None and (self._root is None or self._root.contains(path))
            if self._root is not None and not inside and not row["inode"]:
                keep[index] = False
                self.unresolved += path is None
        rows["reserved"] = 0
        dropped = int((~keep).sum())
        self._rings[schema.LOOKUPS.name].rows -= dropped
        return rows if dropped == 0 else rows[keep]
