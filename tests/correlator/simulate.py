"""A simulated node whose truth is known: requests, one lookup thread, loader threads, one disk.

Times are drawn, not measured, so that every figure the correlator gives has a right answer that
was computed another way. The shape is vLLM's file tier: a burst of tests that stops at the first
miss, then the request's files read one after another by one thread of a pool, or by several
threads that share the job, or by one thread with several reads in an io_uring.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvprobe.capture.frames import frame_from_dicts
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import CLASSES, Ledger
from kvprobe.model import DeviceFacts, EngineFacts
from kvprobe.schema import TABLES, BlockMethod, LookupKind, OpKind

DEVICE = (7 << 20) | 3
FS_DEVICE = DEVICE
UNIT_TOKENS = 16
BYTES_PER_TOKEN = 4096
UNIT_BYTES = UNIT_TOKENS * BYTES_PER_TOKEN
A_S, B_S, C_S = 0.003, 11e-6, 1.3e-9
LOOKUP_TID, STORE_TID, LOADER_TID = 11, 12, 100


@dataclass
class Node:
    """Rows of one simulated run and the truth about them.

    ``prefixes`` prompt families share their first chunks (0: no two prompts share any). Up to
    ``own_stored`` further chunks of a prompt are stored that no other prompt has. A share
    ``cold_share`` of the prompts has nothing stored, a share ``full_hit_share`` has everything
    stored, so that no miss ends the burst. Stored prefixes below ``compute_below`` chunks are
    computed. A file is read in ``pieces`` operations. Between a share ``stall_share`` of its tests
    the lookup thread has no processor for some milliseconds.
    """

    seed: int
    concurrency: int
    requests: int = 211
    prefixes: int = 7
    loaders: int = 16
    fan_out: int = 1
    read_ns: int = 400_000
    queue_share: float = 0.25
    software_ns: int = 30_000
    own_stored: int = 0
    cold_share: float = 0.0
    full_hit_share: float = 0.0
    compute_below: int = 0
    pieces: int = 1
    uring: bool = False
    named: bool = False
    stores: bool = False
    stall_share: float = 0.0
    noise: float = 0.03
    tables: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {name: [] for name in TABLES}
    )
    truth: list[str] = field(default_factory=list)
    """Request id of each row of ``ops``."""
    lookup_truth: list[str] = field(default_factory=list)
    """Request id of each row of ``lookups`` that is a test of that request, else empty."""

    def run(self) -> Node:
        """Simulate; closed loop with ``concurrency`` requests in the engine."""
        self.rng = np.random.default_rng(self.seed)
        slots = [1_000_000_000 + i * 137_000 for i in range(self.concurrency)]
        self.free_loaders = [(0, LOADER_TID + i) for i in range(self.loaders)]
        self.store_free = 0
        lookup_free = 0
        heapq.heapify(slots)
        for i in range(self.requests):
            arrival = heapq.heappop(slots)
            keys, new_chunks = self._prompt(i)
            rest = int(self.rng.integers(1, UNIT_TOKENS))
            begin = max(arrival + 50_000, lookup_free) + int(self.rng.integers(20_000, 90_000))
            lookup_free = self._look_up(begin, keys, new_chunks, f"r{i}")
            restored = keys if len(keys) >= self.compute_below else []
            last = lookup_free
            if restored:
                last = self._restore(lookup_free + 80_000, restored, f"r{i}")
            prompt = (len(keys) + len(new_chunks)) * UNIT_TOKENS + rest
            end = self._request(i, arrival, last, prompt, len(restored) * UNIT_TOKENS)
            if self.named:
                for position, key in enumerate(keys + new_chunks):
                    row = {"request_id": f"r{i}", "position": position, "key": key}
                    self.tables["keys"].append(row)
            if self.stores:
                self._store(end + 40_000, new_chunks, f"r{i}")
            heapq.heappush(slots, end + int(self.rng.integers(100_000, 900_000)))
        return self

    def _prompt(self, i: int) -> tuple[list[str], list[str]]:
        """Stored and new chunks of prompt ``i``."""
        rng = self.rng
        shared, new = int(rng.integers(1, 40)), int(rng.integers(1, 60))
        prefix = int(rng.zipf(1.5)) % max(self.prefixes, 1)
        keys = [f"p{prefix}c{c}" for c in range(shared)] if self.prefixes else []
        if self.own_stored:
            keys += [f"own{i}c{c}" for c in range(int(rng.integers(1, self.own_stored + 1)))]
        kind = rng.random()
        if kind < self.cold_share:
            keys = []
        elif kind > 1 - self.full_hit_share:
            new = 0
        return keys, [f"new{i}c{c}" for c in range(new)]

    def _request(self, i: int, arrival: int, last: int, prompt: int, restored: int) -> int:
        """Add the request whose storage work ended at ``last``; returns the end of prefill."""
        new = prompt - restored
        took = A_S + B_S * new + C_S * new * (restored + new / 2)
        start = last + int(self.rng.integers(30_000, 60_000))
        end = start + int(took * 1e9 * self.rng.normal(1, self.noise))
        self.tables["requests"].append(
            {
                "id": f"r{i}",
                "arrival_ns": arrival,
                "scheduled_ns": arrival + 40_000,
                "prefill_start_ns": start,
                "prefill_end_ns": end,
                "first_token_ns": end + 1009,
                "prompt_tokens": prompt,
                "device_hit_tokens": 0,
                "storage_hit_tokens": restored,
                "computed_tokens": new,
            }
        )
        return end

    def _look_up(self, now: int, keys: list[str], new: list[str], request: str) -> int:
        for key, result in [*((k, 0) for k in keys), *((k, -2) for k in new[:1])]:
            self._lookup(LookupKind.ACCESS, LOOKUP_TID, now, key, result, request)
            now += 9_000
            if self.stall_share and self.rng.random() < self.stall_share:
                now += int(self.rng.integers(2_500_000, 20_000_000))
        return now

    def _lookup(
        self, kind: LookupKind, tid: int, at: int, key: str, result: int, request: str = ""
    ) -> dict[str, Any]:
        row = {
            "start_ns": at,
            "end_ns": at + 3_000,
            "tgid": 10,
            "tid": tid,
            "result": result,
            "kind": kind,
            "cut": 0,
            "path": f"/kv/{key}.bin",
            "kv_key": key,
            "kv_temporary": 0,
        }
        if kind == LookupKind.OPEN:
            row |= {"inode": inode_of(key), "fs_device": FS_DEVICE, "open_flags": 0o40000}
        self.tables["lookups"].append(row)
        self.lookup_truth.append(request)
        return row

    def _restore(self, now: int, keys: list[str], request: str) -> int:
        """One job; its tasks take the next key when they are free, each on its own thread."""
        tasks = []
        if self.uring:
            free, tid = heapq.heappop(self.free_loaders)
            tasks = [(max(now, free) + 7_000 * i, tid) for i in range(self.fan_out)]
        else:
            for _ in range(min(self.fan_out, len(keys), len(self.free_loaders))):
                free, tid = heapq.heappop(self.free_loaders)
                tasks.append((max(now, free), tid))
        tids = {tid for _, tid in tasks}
        heapq.heapify(tasks)
        for key in keys:
            at, tid = heapq.heappop(tasks)
            heapq.heappush(tasks, (self._read(at + 15_000, key, tid, request), tid))
        last = max(at for at, _ in tasks)
        for tid in tids:
            heapq.heappush(self.free_loaders, (max(at for at, t in tasks if t == tid), tid))
        return last

    def _read(self, at: int, key: str, tid: int, request: str) -> int:
        self._lookup(LookupKind.OPEN, tid, at - 5_000, key, 9)
        size = UNIT_BYTES // self.pieces
        for piece in range(self.pieces):
            took = int(self.read_ns / self.pieces * self.rng.uniform(0.7, 1.4))
            end = at + self.software_ns + took
            self._io(at, end, key, piece * size, size, tid, False)
            self.truth.append(request)
            at = end + 2_000
        return end

    def _io(
        self, at: int, end: int, key: str, offset: int, size: int, tid: int, write: bool
    ) -> None:
        """One direct operation and the block request under it."""
        kind = OpKind.WRITE if write else OpKind.URING_READ if self.uring else OpKind.PREAD64
        file = {"inode": inode_of(key), "fs_device": FS_DEVICE, "offset": offset}
        self.tables["ops"].append(
            {
                "start_ns": at,
                "end_ns": end,
                "requested": size,
                "result": size,
                "tgid": 10,
                "tid": tid,
                "kind": kind,
                "direct": 1,
                "reserved": 0,
                **file,
            }
        )
        queued = at + self.software_ns
        self.tables["block"].append(
            {
                "queued_ns": queued,
                "issued_ns": queued + int((end - queued) * self.queue_share),
                "done_ns": end,
                "sector": 8 * inode_of(key) + offset // 512,
                "bytes": size,
                "device": DEVICE,
                "tgid": 10,
                "tid": tid,
                "flags": 0,
                "op": int(write),
                "method": BlockMethod.DIRECT,
                "status": 0,
                "held": 0,
                **file,
            }
        )

    def _store(self, now: int, keys: list[str], request: str) -> None:
        """The writer tests each chunk, writes it under a temporary name and renames it."""
        now = max(now, self.store_free)
        for key in keys:
            self._lookup(LookupKind.ACCESS, STORE_TID, now, key, -2)
            row = self._lookup(LookupKind.OPEN, STORE_TID, now + 4_000, key, 8)
            row |= {"path": f"/kv/{key}.bin_7.tmp", "kv_temporary": 1, "open_flags": 0o40101}
            self._io(now + 9_000, now + 200_000, key, 0, UNIT_BYTES, STORE_TID, True)
            self.truth.append(request)
            at = now + 205_000
            old = self._lookup(LookupKind.RENAME_FROM, STORE_TID, at, key, 0)
            old |= {"path": f"/kv/{key}.bin_7.tmp", "kv_temporary": 1}
            self._lookup(LookupKind.RENAME_TO, STORE_TID, at, key, 0)
            now += 220_000
        self.store_free = now

    def capture(self, **engine: Any) -> FixedTables:
        """The rows as tables; ops keep their order, so ``truth`` stays aligned.

        ``engine`` replaces what the engine tells about itself.
        """
        last = max(r["done_ns"] for r in self.tables["block"])
        told: dict[str, Any] = {
            "unit_tokens": UNIT_TOKENS,
            "unit_bytes": UNIT_BYTES,
            "bytes_per_token": BYTES_PER_TOKEN,
            "reads_in_flight": self.fan_out,
            "direct": True,
        }
        manifest = Manifest(
            kvprobe="test",
            capture_id="simulated",
            start_ns=1_000_000_000,
            end_ns=max(last, *(row["first_token_ns"] or 0 for row in self.tables["requests"]))
            + 1009,
            clock=Clock(0),
            complete=True,
            engine_name="jsonl",
            engine=EngineFacts("simulated", **(told | engine)),
            devices=(DeviceFacts(DEVICE, "loop3", "loop"),),
        )
        frames = {n: frame_from_dicts(TABLES[n], rows) for n, rows in self.tables.items()}
        return FixedTables(manifest, frames)

    def right_share(self, ledger: Ledger, best: str = "exact", worst: str = "thread") -> float:
        """Share of read bytes that went to the right request in a class ``best`` to ``worst``."""
        ids = [a.id for a in ledger.accounts]
        ops = ledger.ops
        classes = range(CLASSES.index(best), CLASSES.index(worst) + 1)
        right = total = 0
        for owner, level, kind, size, want in zip(
            ops["request"], ops["class"], ops["kind"], ops["result"], self.truth, strict=True
        ):
            if kind < OpKind.WRITE:
                total += int(size)
                right += int(size) * (owner >= 0 and ids[owner] == want and level in classes)
        return right / total


_inodes: dict[str, int] = {}


def inode_of(key: str) -> int:
    """A stable inode per key."""
    return _inodes.setdefault(key, 1009 + len(_inodes))
