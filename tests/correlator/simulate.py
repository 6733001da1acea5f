"""A simulated node whose truth is known: requests, one lookup thread, loader threads, one disk.

Times are drawn, not measured, so that every figure the correlator gives has a right answer that
was computed another way. The shape is vLLM's file tier: a burst of tests that stops at the first
miss, then the request's files read one after another by one thread of a pool.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvprobe.capture.frames import frame_from_dicts
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.model import DeviceFacts, EngineFacts
from kvprobe.schema import TABLES, BlockMethod, LookupKind, OpKind

DEVICE = (7 << 20) | 3
FS_DEVICE = DEVICE
UNIT_TOKENS = 16
BYTES_PER_TOKEN = 4096
UNIT_BYTES = UNIT_TOKENS * BYTES_PER_TOKEN
A_S, B_S, C_S = 0.003, 11e-6, 1.3e-9


@dataclass
class Node:
    """Rows of one simulated run and the truth about them."""

    seed: int
    concurrency: int
    requests: int = 211
    prefixes: int = 7
    loaders: int = 16
    fan_out: int = 1
    read_ns: int = 400_000
    queue_share: float = 0.25
    software_ns: int = 30_000
    tables: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {name: [] for name in TABLES}
    )
    truth: list[str] = field(default_factory=list)
    """Request id of each row of ``ops``."""

    def run(self) -> Node:
        """Simulate; closed loop with ``concurrency`` requests in the engine."""
        rng = np.random.default_rng(self.seed)
        slots = [1_000_000_000 + i * 137_000 for i in range(self.concurrency)]
        loaders = [(0, 100 + i) for i in range(self.loaders)]
        lookup_free = 0
        heapq.heapify(slots)
        for i in range(self.requests):
            arrival = heapq.heappop(slots)
            shared, own = int(rng.integers(1, 40)), int(rng.integers(1, 60))
            prefix = int(rng.zipf(1.5)) % self.prefixes
            keys = [f"p{prefix}c{c}" for c in range(shared)]
            begin = max(arrival + 50_000, lookup_free) + int(rng.integers(20_000, 90_000))
            lookup_free = self._look_up(begin, keys, f"own{i}")
            last = self._restore(lookup_free + 80_000, keys, f"r{i}", loaders, rng)
            new = own * UNIT_TOKENS + 5
            prompt = shared * UNIT_TOKENS + new
            context = prompt - new
            took = A_S + B_S * new + C_S * new * (context + new / 2)
            start = last + int(rng.integers(30_000, 60_000))
            end = start + int(took * 1e9 * rng.normal(1, 0.03))
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
                    "storage_hit_tokens": shared * UNIT_TOKENS,
                    "computed_tokens": new,
                }
            )
            heapq.heappush(slots, end + int(rng.integers(100_000, 900_000)))
        return self

    def _look_up(self, now: int, keys: list[str], miss: str) -> int:
        for key, result in [*((k, 0) for k in keys), (miss, -2)]:
            self._lookup(LookupKind.ACCESS, 11, now, key, result)
            now += 9_000
        return now

    def _lookup(self, kind: LookupKind, tid: int, at: int, key: str, result: int) -> None:
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

    def _restore(
        self,
        now: int,
        keys: list[str],
        request: str,
        loaders: list[tuple[int, int]],
        rng: np.random.Generator,
    ) -> int:
        """One job, or ``fan_out`` jobs with every n-th key, each on the next free loader."""
        ends = []
        for part in range(min(self.fan_out, len(keys))):
            free, tid = heapq.heappop(loaders)
            at = max(now, free)
            for key in keys[part :: self.fan_out]:
                at = self._read(at + 15_000, key, tid, request, rng)
            heapq.heappush(loaders, (at, tid))
            ends.append(at)
        return max(ends)

    def _read(self, at: int, key: str, tid: int, request: str, rng: np.random.Generator) -> int:
        self._lookup(LookupKind.OPEN, tid, at - 5_000, key, 9)
        took = int(self.read_ns * rng.uniform(0.7, 1.4))
        end = at + self.software_ns + took
        self.tables["ops"].append(
            {
                "start_ns": at,
                "end_ns": end,
                "inode": inode_of(key),
                "offset": 0,
                "requested": UNIT_BYTES,
                "result": UNIT_BYTES,
                "fs_device": FS_DEVICE,
                "tgid": 10,
                "tid": tid,
                "kind": OpKind.READ,
                "direct": 1,
                "reserved": 0,
            }
        )
        self.truth.append(request)
        queued = at + self.software_ns
        self.tables["block"].append(
            {
                "queued_ns": queued,
                "issued_ns": queued + int(took * self.queue_share),
                "done_ns": end,
                "inode": inode_of(key),
                "sector": 8 * inode_of(key),
                "offset": 0,
                "bytes": UNIT_BYTES,
                "device": DEVICE,
                "fs_device": FS_DEVICE,
                "tgid": 10,
                "tid": tid,
                "flags": 0,
                "op": 0,
                "method": BlockMethod.DIRECT,
                "status": 0,
                "held": 0,
            }
        )
        return end

    def capture(self) -> FixedTables:
        """The rows as tables; ops keep their order, so ``truth`` stays aligned."""
        last = max(r["first_token_ns"] for r in self.tables["requests"])
        manifest = Manifest(
            kvprobe="test",
            capture_id="simulated",
            start_ns=1_000_000_000,
            end_ns=last,
            clock=Clock(0),
            complete=True,
            engine_name="jsonl",
            engine=EngineFacts(
                "simulated",
                unit_tokens=UNIT_TOKENS,
                unit_bytes=UNIT_BYTES,
                bytes_per_token=BYTES_PER_TOKEN,
                reads_in_flight=self.fan_out,
                direct=True,
            ),
            devices=(DeviceFacts(DEVICE, "loop3", "loop"),),
        )
        frames = {n: frame_from_dicts(TABLES[n], rows) for n, rows in self.tables.items()}
        return FixedTables(manifest, frames)


def inode_of(key: str) -> int:
    """A stable inode per key."""
    return 1000 + int.from_bytes(key.encode(), "big") % 1_000_003
