"""Runs of the real workload under the real capture, with the truth it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.capture.reader import Capture, open_capture
from kvprobe.correlator import Ledger, correlate
from kvprobe.workload.scratch import Scratch, scratch_filesystem

KVPROBE = (sys.executable, "-m", "kvprobe")
SHAPE = ("--model", "custom", "--layers", "4", "--kv-heads", "4", "--head-dim", "64")
PROMPTS = ("--prompt-tokens", "512", "--max-prompt-tokens", "1500", "--unit-tokens", "16")
PREFILL = ("--prefill-cost", "2,20,0.1")


@dataclass
class Run:
    """One traced run: the capture, its ledger and the workload's own words."""

    capture: Capture
    ledger: Ledger
    truth: list[dict[str, Any]] = field(default_factory=list)
    diskstats: dict[str, int] = field(default_factory=dict)

    def did(self, *kinds: str) -> list[dict[str, Any]]:
        """The workload's operations of these kinds while it was traced."""
        return [row for row in self.truth if row["kind"] in kinds and row["phase"] == "run"]

    def request_of_ops(self) -> list[str | None]:
        """Per KV operation of the ledger, the request that the workload says caused it.

        Joined by file, direction and time: the workload's stamps enclose the kernel's.
        """
        rows: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for row in self.did("read", "write"):
            rows.setdefault((row["key"], row["kind"] == "write"), []).append(row)
        ops, found = self.ledger.ops, []
        for i in range(len(ops["key"])):
            fits = [
                row["id"]
                for row in rows.get((ops["key"][i], ops["kind"][i] >= 64), ())
                if row["start_ns"] <= ops["start_ns"][i]
                and ops["end_ns"][i] <= row["end_ns"]
                # An io_uring is submitted and reaped by the thread that the truth names.
                and row["tid"] == ops["tid"][i]
            ]
            assert fits, "an operation was traced that the workload did not make"
            found.append(fits[0])
        return found


@pytest.fixture(scope="session")
def disk() -> Iterator[Scratch]:
    """A file system of our own on a loop device of our own."""
    with scratch_filesystem(4 << 30) as scratch:
        assert scratch.device is not None, scratch.why
        yield scratch


def traced(
    disk: Scratch,
    folder: Path,
    name: str,
    *options: str,
    capture: tuple[str, ...] = (),
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Store chunks, then trace a run that restores them.

    ``log`` is the accelerator's; ``environment`` is of the tracer, which looks for a driver there.
    """
    root = Path(disk.root, name)
    root.mkdir()
    events, truth, out = (folder / f"{name}.{suffix}" for suffix in ("jsonl", "truth", "kvcap"))
    workload = (
        *KVPROBE,
        "workload",
        "run",
        "--root",
        str(root),
        *SHAPE,
        *PROMPTS,
        *PREFILL,
        *options,
    )
    call(*workload, "--warm", "reused", "--warm-only", "--drop-caches")
    files = ["--events", str(events), "--truth", str(truth)]
    if log is not None:
        files += ["--accelerator-log", str(log)]
    scope = capture or ("--root", str(root))
    before = diskstats(disk)
    call(
        *(*KVPROBE, "capture", "-o", str(out), "--engine", "jsonl", "--signal", str(events)),
        *(*scope, "--", *workload, *files),
        environment=environment,
    )
    call("sync", "-f", disk.root)
    after = diskstats(disk)
    moved = {key: after[key] - before[key] for key in after}
    return read_run(out, truth, moved)


def read_run(out: Path, truth: Path, moved: dict[str, int]) -> Run:
    """Correlate a capture; the tables that tests look at stay in memory."""
    with open_capture(out) as opened:
        ledger = correlate(opened)
        opened.frame("lookups")
    rows = [json.loads(line) for line in truth.read_text().splitlines()]
    return Run(opened, ledger, rows, moved)


def diskstats(disk: Scratch) -> dict[str, int]:
    """The kernel's own counters of the device, in bytes and requests."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if words[2] == disk.name:
            return {
                "reads": int(words[3]),
                "read_bytes": int(words[5]) * 512,
                "writes": int(words[7]),
                "write_bytes": int(words[9]) * 512,
            }
    raise AssertionError(f"{disk.name} is not in /proc/diskstats")


def right_share(run: Run, worst_class: int) -> float:
    """Share of restored bytes given to the right request by a class at least that good."""
    ops, ids = run.ledger.ops, [account.id for account in run.ledger.accounts]
    wanted = run.request_of_ops()
    reads = np.flatnonzero((ops["kind"] < 64) & (ops["result"] > 0))
    good = [
        ops["result"][i]
        for i in reads
        if ops["class"][i] <= worst_class
        and ops["request"][i] >= 0
        and ids[ops["request"][i]] == wanted[i]
    ]
    return float(np.sum(good) / ops["result"][reads].sum())


def call(*command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run one command; its output is the message where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
