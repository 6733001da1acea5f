"""A session that yields rows known beforehand, and ``main`` to record one in a process of its own.

``python -m tests.capture.fake_source OUT SECONDS ROWS_PER_POLL``
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe import schema
from kvprobe.adapter import SignalBatch
from kvprobe.bpf.governor import Thinning
from kvprobe.capture.manifest import Clock, Host, Manifest
from kvprobe.capture.record import record
from kvprobe.capture.recorder import Recorder
from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    Filters,
    Loss,
    Missing,
    ProgramCost,
    Rows,
)
from kvprobe.sources.live import LiveSource

DEVICE = (259 << 20) | 1
START_NS = 5_000_000_000
CHUNK = "/mnt/kv/Llama_0123456789ab_r0/abc/de_g0/abcde{:011x}.bin"


def block_rows(count: int, first: int = 0, at_ns: int = START_NS) -> Rows:
    """Block rows numbered from ``first``; every fifth owner is unknown."""
    number = np.arange(first, first + count, dtype=np.uint64)
    rows = np.zeros(count, schema.numpy_dtype(schema.BLOCK))
    rows["done_ns"] = at_ns + number * 1000
    rows["queued_ns"] = rows["done_ns"] - 900
    rows["issued_ns"] = rows["done_ns"] - 700
    rows["inode"] = np.where(number % 5 == 0, 0, 1000 + number)
    rows["sector"] = number * 8
    rows["offset"] = np.where(number % 5 == 0, schema.U64_MAX, number * 4096)
    rows["bytes"] = 4096
    rows["device"] = DEVICE
    rows["fs_device"] = DEVICE
    rows["tgid"] = 4242
    rows["tid"] = 4243
    rows["hw_queue"] = np.where(number % 5 == 0, schema.U32_MAX, number % 3)
    rows["op"] = number % 2
    rows["method"] = schema.BlockMethod.DIRECT
    return rows


def op_rows(count: int, first: int = 0) -> Rows:
    """Reads numbered from ``first``; every seventh fails with EPERM, which is -1 as a result."""
    number = np.arange(first, first + count, dtype=np.uint64)
    rows = np.zeros(count, schema.numpy_dtype(schema.OPS))
    rows["start_ns"] = START_NS + number * 1000
    rows["end_ns"] = rows["start_ns"] + 950
    rows["inode"] = 1000 + number
    rows["offset"] = number * 4096
    rows["requested"] = 4096
    rows["result"] = np.where(number % 7 == 0, -1, 4096)
    rows["tgid"] = 4242
    rows["tid"] = 4243
    rows["kind"] = schema.OpKind.PREAD64
    return rows


def lookup_rows(paths: list[bytes]) -> Rows:
    """Opens that succeeded, one for each path."""
    rows = np.zeros(len(paths), schema.numpy_dtype(schema.LOOKUPS))
    number = np.arange(len(paths), dtype=np.uint64)
    rows["start_ns"] = START_NS + number * 1000
    rows["end_ns"] = rows["start_ns"] + 500
    rows["inode"] = 1000 + number
    rows["result"] = 9
    rows["kind"] = schema.LookupKind.OPEN
    rows["open_flags"] = schema.U32_MAX
    rows["path"] = paths
    return rows


def chunk_paths(count: int) -> list[bytes]:
    """Paths of vLLM's file tier, every third one a temporary name."""
    names = (CHUNK.format(i) + (f"_{i}.tmp" if i % 3 == 0 else "") for i in range(count))
    return [name.encode() for name in names]


def request_dicts(count: int) -> list[dict[str, Any]]:
    """Requests; the last one never got its first token."""
    rows = [
        {
            "id": f"req-{i}",
            "arrival_ns": START_NS + i * 1_000_000,
            "first_token_ns": START_NS + i * 1_000_000 + 70_001,
            "prompt_tokens": 17 + i,
        }
        for i in range(count)
    ]
    rows[-1]["first_token_ns"] = None
    return rows


def manifest(start_ns: int = START_NS) -> Manifest:
    """Facts with every field set that can hold a name."""
    return Manifest(
        kvprobe="0.0.test",
        capture_id="fedcba9876543210",
        start_ns=start_ns,
        end_ns=start_ns,
        clock=Clock(before_ns=1_700_000_000_000_000_000, uncertainty_ns=151),
        host=Host("secrethost.corp.example", "6.1.0", "x86_64", 3, 1 << 33, "boot-SECRETBOOT"),
        loader="core",
        probes=("block", "ops"),
        missing=(
            Missing("nvme", "no tracepoint on secrethost.corp.example", "queues are hidden"),
            Missing("signal", "cannot read /srv/secretdir/events.jsonl", "from 192.0.2.77", "x"),
        ),
        filters=Filters(tgids=(4242,), root="/mnt/secretdir"),
        engine=EngineFacts("vllm", model="/models/secretmodel", root="/mnt/secretdir"),
        engine_name="vllm",
        devices=(DeviceFacts(DEVICE, "nvme0n1", "nvme pcie", mounts=("/mnt/secretdir",)),),
    )


class FakeSession:
    """Block rows with consecutive numbers, ``count`` at each poll, up to ``total``."""

    def __init__(self, count: int, total: int | None = None) -> None:
        self.count = count
        self.total = total
        self.given = 0
        self.closed = False

    def poll(self) -> Mapping[str, Rows]:
        left = self.count if self.total is None else min(self.count, self.total - self.given)
        rows = block_rows(left, self.given, time.monotonic_ns() if self.total is None else START_NS)
        self.given += left
        return {"block": rows}

    def aggregates(self) -> Mapping[str, Rows]:
        rows = np.zeros(1, schema.numpy_dtype(schema.DEPTH))
        rows["device"], rows["time_ns"] = DEVICE, 1_000_003
        return {"depth": rows}

    def losses(self) -> Mapping[str, Loss]:
        return {"block": Loss(self.given, lost=13, thinned=0)}

    def cost(self) -> tuple[ProgramCost, ...]:
        return (ProgramCost("block_done", self.given, self.given * 103),)

    measured_ns = 500_009
    thinnings: Sequence[Thinning] = ()

    def close(self) -> None:
        self.closed = True


class FakeSignal:
    """Three requests at the first poll, one that never ended at the close."""

    def __init__(self) -> None:
        self.polled = False

    def poll(self) -> SignalBatch:
        if self.polled:
            return SignalBatch()
        self.polled = True
        rows = request_dicts(4)[:3]
        keys = [{"request_id": row["id"], "position": 0, "key": "abcde00000000000"} for row in rows]
        return SignalBatch(rows, keys, EngineFacts("vllm", unit_tokens=16), 3, 2)

    def end(self) -> SignalBatch:
        return SignalBatch()

    def close(self) -> SignalBatch:
        return SignalBatch(request_dicts(4)[3:])


def main(out: str, seconds: str, rows_per_poll: str) -> None:
    """Record for a while, saying ``started`` first and then each second how many rows there are."""
    source = LiveSource(FakeSession(int(rows_per_poll)), FakeSignal())
    recorder = Recorder(Path(out))
    start_ns = time.monotonic_ns()
    end_ns = start_ns + int(float(seconds) * 1e9)
    print("started", flush=True)
    final = record(
        source,
        recorder,
        manifest(start_ns),
        lambda now_ns: now_ns >= end_ns,
        lambda now: print("rows", now.losses["block"].rows, flush=True),
    )
    heavy = {"pandas", "pyarrow", "rich", "scipy", "textual"} & set(sys.modules)
    print("heavy", sorted(heavy), flush=True)
    print("agent_cpu_ns", final.cost.agent_cpu_ns, "wall_ns", final.cost.wall_ns, flush=True)
    recorder.finish(final)
    print("finished", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
