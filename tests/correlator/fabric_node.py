"""A simulated node whose KV cache is on NVMe over fabrics: paths, queue pairs, tags, stamps.

An event simulation in the order of time, so that queues really fill and the truth is known: each
command waits for a tag of its queue, is sent, travels, is received. Faults are parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvprobe.capture.frames import frame_from_dicts
from kvprobe.capture.manifest import Clock, Host, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.model import DeviceFacts, EngineFacts, Loss, Missing, NvmePath
from kvprobe.schema import TABLES, BlockMethod, FabricKind, LookupKind, NvmeTransport, OpKind

US, MS = 1_000, 1_000_000
KIB, MIB = 1 << 10, 1 << 20
HEAD, FS_DEVICE = 259 << 20 | 7, 259 << 20 | 7
UNIT_TOKENS = 256
LOOKUP_TID, READER_TID = 11, 100
NQN = "nqn.2014-08.org.nvmexpress:uuid:kv"
START_NS = 1_000_000_000


def path_device(path: int) -> int:
    return 259 << 20 | (8 + path)


def address(path: int) -> str:
    return f"traddr=10.0.{path}.7,trsvcid=4420"


@dataclass
class FabricNode:
    """One simulated run.

    ``paths`` with ``policy`` "round-robin" or "numa" (the first path only). ``extra_ns`` is the
    longer way of each path. ``stalls`` are (start, length): all connections of path 0 lose a
    segment then, and what was to arrive does so at its end, when the segment is sent again.
    ``one_at_a_time``: blk-throttle lets the node's reads through one by one.
    ``one_reader``: one thread reads for all requests. ``receive_factor``
    makes the receiving processor slower, and busy. ``stamps`` False: neither sending nor arrival
    was recorded.
    """

    seed: int = 3
    requests: int = 61
    concurrency: int = 3
    reads: int = 16
    in_flight: int = 4
    unit_bytes: int = MIB
    paths: int = 1
    policy: str = "round-robin"
    io_queues: int = 4
    queue_size: int = 128
    max_bytes: int = 1280 * KIB
    extra_ns: tuple[int, ...] = ()
    stalls: tuple[tuple[int, int], ...] = ()
    one_at_a_time: bool = False
    one_reader: bool = False
    pinned: bool = False
    wire_ns: int = 300 * US
    prefill_ns: int = 20 * MS
    receive_factor: float = 1.0
    stamps: bool = True
    transport: NvmeTransport = NvmeTransport.TCP
    reconnect: bool = False
    tables: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {name: [] for name in TABLES}
    )

    def run(self) -> FabricNode:
        """Simulate until all requests are done."""
        self.rng = np.random.default_rng(self.seed)
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._count = 0
        self._done_of_queue: dict[tuple[int, int], list[int]] = {}
        self._next_path = 0
        self._gate = 0
        self._reading = False
        self._waiting: list[tuple[str, Callable[[int], None]]] = []
        self._identity = 0
        self._started = 0
        for slot in range(self.concurrency):
            self._at(START_NS + slot * 137 * US, partial(self._request, slot))
        while self._events:
            now, _, action = heapq.heappop(self._events)
            action(now)
        self._losses()
        return self

    def _at(self, when: int, action: Callable[[int], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    # ------------------------------------------------------------ the engine

    def _request(self, slot: int, now: int) -> None:
        if self._started == self.requests:
            return
        i, self._started = self._started, self._started + 1
        keys = [f"r{i}c{c}" for c in range(self.reads)]
        at = now + 50 * US
        for key, result in [*((key, 0) for key in keys), (f"r{i}new", -2)]:
            self._lookup(LookupKind.ACCESS, LOOKUP_TID, at, key, result)
            at += 2 * US
        waiting = list(reversed(keys))
        left = len(keys)

        def read_next(tid: int, when: int) -> None:
            if waiting:
                self._read(when + 10 * US, waiting.pop(), tid, lambda end: done(end, tid))

        def done(end: int, tid: int) -> None:
            nonlocal left
            left -= 1
            if left:
                read_next(tid, end)
            else:
                self._finish(i, now, end, slot)

        for task in range(min(self.in_flight, len(keys))):
            tid = READER_TID + slot * 64 + task
            self._at(at + 80 * US + task * 3 * US, partial(read_next, tid))

    def _finish(self, i: int, arrival: int, last: int, slot: int) -> None:
        start = last + 40 * US
        end = start + int(self.prefill_ns * self.rng.normal(1, 0.02))
        self.tables["requests"].append(
            {
                "id": f"r{i}", "arrival_ns": arrival, "scheduled_ns": arrival + 40 * US,
                "prefill_start_ns": start, "prefill_end_ns": end, "first_token_ns": end + 1009,
                "prompt_tokens": (self.reads + 2) * UNIT_TOKENS, "device_hit_tokens": 0,
                "storage_hit_tokens": self.reads * UNIT_TOKENS,
                "computed_tokens": 2 * UNIT_TOKENS,
            }
        )  # fmt: skip
        self._at(end + int(self.rng.integers(100 * US, 900 * US)), partial(self._request, slot))

    def _lookup(self, kind: LookupKind, tid: int, at: int, key: str, result: int) -> None:
        row: dict[str, Any] = {
            "start_ns": at, "end_ns": at + US, "tgid": 10, "tid": tid, "result": result,
            "kind": kind, "cut": 0, "path": f"/kv/{key}.bin", "kv_key": key, "kv_temporary": 0,
        }  # fmt: skip
        if kind == LookupKind.OPEN:
            row |= {"inode": inode_of(key), "fs_device": FS_DEVICE, "open_flags": 0o40000}
        self.tables["lookups"].append(row)

    def _read(self, at: int, key: str, tid: int, done: Callable[[int], None]) -> None:
        """One direct read: its pieces are submitted one after another, each when it has a tag."""
        if self.one_reader:
            if self._reading:
                self._waiting.append((key, done))
                return
            self._reading, tid, done = True, READER_TID, partial(self._next_read, done)
        self._lookup(LookupKind.OPEN, tid, at - 5 * US, key, 9)
        begin = at
        if self.one_at_a_time:
            begin = max(at, self._gate)
        pieces = [
            (offset, min(self.max_bytes, self.unit_bytes - offset))
            for offset in range(0, self.unit_bytes, self.max_bytes)
        ]
        ends: list[int] = []

        def submit(now: int) -> None:
            path, queue = self._way(tid)
            busy = self._done_of_queue.setdefault((path, queue), [])
            while busy and busy[0] <= now:
                heapq.heappop(busy)
            if len(busy) >= self.queue_size:
                self._at(busy[0], submit)  # whoever comes first takes the tag
                return
            offset, size = pieces[len(ends)]
            end = self._command(now, path, queue, key, offset, size, tid)
            heapq.heappush(busy, end)
            ends.append(end)
            if len(ends) < len(pieces):
                self._at(now + 2 * US, submit)
                return
            last = max(ends) + 4 * US
            self.tables["ops"].append(
                {
                    "start_ns": at, "end_ns": last, "requested": self.unit_bytes,
                    "result": self.unit_bytes, "tgid": 10, "tid": tid, "kind": OpKind.PREAD64,
                    "direct": 1, "reserved": 0, "inode": inode_of(key), "fs_device": FS_DEVICE,
                    "offset": 0,
                }
            )  # fmt: skip
            self._at(last, done)

        if self.one_at_a_time:
            # Held back below the read: blk-throttle, a lock of the file system.
            self._gate = begin + self.wire_ns + 200 * US
        self._at(begin + 8 * US, submit)

    def _next_read(self, done: Callable[[int], None], now: int) -> None:
        """The one reader goes on with whoever waits longest."""
        self._reading = False
        if self._waiting:
            key, then = self._waiting.pop(0)
            self._read(now + 10 * US, key, READER_TID, then)
        done(now)

    # ------------------------------------------------------------ the fabric

    def _way(self, tid: int) -> tuple[int, int]:
        path = 0
        if self.policy == "round-robin":
            path, self._next_path = self._next_path, (self._next_path + 1) % self.paths
        return path, 1 if self.pinned else 1 + tid % self.io_queues

    def _command(
        self, now: int, path: int, queue: int, key: str, offset: int, size: int, tid: int
    ) -> int:
        """Rows of one command; returns when its tag is free again."""
        rng = self.rng
        setup = now + US
        sent = setup + int(rng.integers(4 * US, 9 * US))
        extra = self.extra_ns[path] if path < len(self.extra_ns) else 0
        arrived = sent + int((self.wire_ns + extra) * rng.uniform(0.8, 1.25))
        for start, length in self.stalls if path == 0 else ():
            if sent <= start + length and arrived >= start:
                arrived = max(arrived, start + length + int(rng.integers(0, 50 * US)))
        received = int(size * 0.06 * self.receive_factor * rng.uniform(0.9, 1.1))
        done = arrived + 5 * US + received
        end = done + int(rng.integers(2 * US, 6 * US))
        self._identity += 1
        request = 1 << 40 | self._identity % (64 * self.io_queues)
        sector = (inode_of(key) * self.unit_bytes + offset) // 512
        device = self._device_now(path, now)
        self.tables["block"].append(
            {
                "queued_ns": setup - US, "issued_ns": setup + US // 2, "done_ns": end,
                "request": request, "sector": sector, "bytes": size, "device": device,
                "tgid": 10, "tid": tid, "flags": 0, "op": 0, "hw_queue": queue - 1,
                "method": BlockMethod.DIRECT, "status": 0, "held": int(self.one_at_a_time),
                "inode": inode_of(key), "fs_device": FS_DEVICE, "offset": 0,
            }
        )  # fmt: skip
        self.tables["nvme"].append(
            {
                "done_ns": done, "setup_ns": setup, "sent_ns": sent if self.stamps else None,
                "arrived_ns": arrived if self.stamps else None, "request": request,
                "bytes": size, "device": device, "nsid": 1,
                "controller": self._controller(path, now),
                "queue": queue, "command_id": self._identity & 0xFFF, "status": 0, "opcode": 2,
                "retries": 0, "transport": self.transport, "reserved": 0,
            }
        )  # fmt: skip
        return end

    def _device_now(self, path: int, now: int) -> int:
        """Path 0 comes back under another number after a reconnect."""
        later = self.reconnect and path == 0 and now >= START_NS + 200 * MS
        return path_device(path) + (32 if later else 0)

    def _controller(self, path: int, now: int) -> int:
        return path + (8 if self._device_now(path, now) != path_device(path) else 0)

    def _losses(self) -> None:
        """A segment sent again at the end of each stall, and the congestion state before."""
        for start, length in self.stalls:
            for kind, value, at in (
                (FabricKind.RETRANSMIT, 0, start + length),
                (FabricKind.CONGESTION_STATE, 4, start + length - 10 * US),
                (FabricKind.CONGESTION_STATE, 0, start + length + 90 * US),
            ):
                self.tables["fabric"].append(
                    {"time_ns": at, "value": value, "controller": 0, "queue": None, "kind": kind,
                     "reserved": 0, "unused": 0, "padding": 0}
                )  # fmt: skip

    # ------------------------------------------------------------ as tables

    def nvme_paths(self) -> tuple[NvmePath, ...]:
        """What sysfs would have shown, in the order of time."""
        versions = [(path, 0) for path in range(self.paths)]
        if self.reconnect:
            versions.append((0, 1))
        return tuple(
            NvmePath(
                device=path_device(path) + 32 * version,
                name=f"nvme0c{path + 8 * version}n1",
                head="nvme0n1",
                controller=path + 8 * version,
                transport=self.transport.name.lower(),
                head_device=HEAD,
                nqn=NQN,
                address=address(path),
                nsid=1,
                state="live",
                ana_state="optimized",
                io_queues=self.io_queues,
                queue_size=self.queue_size,
                iopolicy=self.policy,
            )
            for path, version in versions
        )

    def host_rows(self, end_ns: int) -> list[dict[str, Any]]:
        """Counters of two processors each 20 ms; the first receives."""
        busy = {"cpu0": 0.97 if self.receive_factor > 2 else 0.35, "cpu1": 0.4}
        soft = {"cpu0": 0.62 if self.receive_factor > 2 else 0.1, "cpu1": 0.05}
        rows = []
        for i, time in enumerate(range(START_NS - 10 * MS, end_ns + 20 * MS, 20 * MS)):
            for name in busy:
                for metric, share in (("cpu_busy_ns", busy), ("cpu_softirq_ns", soft)):
                    value = share[name] * i * 20 * MS
                    rows.append(
                        {"time_ns": time, "metric": metric, "subject": name, "value": value}
                    )
        return rows

    def manifest(self, **changes: Any) -> Manifest:
        """The facts of the run."""
        last = max((r["first_token_ns"] for r in self.tables["requests"]), default=START_NS)
        recorded = ("ops", "lookups", "block", "nvme", "fabric")
        given: dict[str, Any] = {
            "kvprobe": "test",
            "capture_id": "simulated",
            "start_ns": START_NS - MS,
            "end_ns": last + MS,
            "clock": Clock(0),
            "complete": True,
            "host": Host(cpus=8),
            "engine_name": "jsonl",
            "engine": EngineFacts(
                "simulated", unit_tokens=UNIT_TOKENS, unit_bytes=self.unit_bytes,
                reads_in_flight=self.in_flight, direct=True,
            ),
            "devices": (
                DeviceFacts(
                    HEAD, "nvme0n1", "nvme tcp", max_request_bytes=self.max_bytes, mounts=("/kv",)
                ),
            ),
            "nvme_paths": self.nvme_paths(),
            "losses": {name: Loss(len(self.tables[name])) for name in recorded},
            "missing": () if self.stamps else (
                Missing("function nvme_tcp_try_send", "this kernel has no such function", "sent"),
                Missing("tracepoint sk_data_ready", "this kernel has no such event", "arrived"),
            ),
        }  # fmt: skip
        return Manifest(**(given | changes))

    def capture(self, **changes: Any) -> FixedTables:
        """The rows as tables, by completion as the kernel delivers them."""
        manifest = self.manifest(**changes)
        tables = self.tables | {"host": self.host_rows(manifest.end_ns)}
        for name in ("block", "nvme"):
            tables[name] = sorted(tables[name], key=lambda row: row["done_ns"])
        return FixedTables(
            manifest, {name: frame_from_dicts(TABLES[name], rows) for name, rows in tables.items()}
        )


_inodes: dict[str, int] = {}


def inode_of(key: str) -> int:
    """A stable inode per key."""
    return _inodes.setdefault(key, 1009 + len(_inodes))
