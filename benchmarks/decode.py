"""How fast rows are read: kvprobe's spans of a mapped ring, against a call or a tuple for each row.

Every method reads the same record (a ``block`` row) out of a ring that was filled before, and adds
up one column, which is compared with what was written.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from benchmarks.harness.estimate import median_interval
from benchmarks.harness.quiet import wait_until_quiet
from benchmarks.rivals import reason
from kvprobe import schema
from kvprobe.bpf import attach, trial
from kvprobe.bpf.ring import HEADER_BYTES, Ring
from kvprobe.errors import KvprobeError
from kvprobe.model import Interval, Rows

AIM_ROWS_PER_SECOND = 20e6
RING_BYTES = 16 << 20
LATENCY_NS = 10_007
"""Of every row; prime, so that a sum is right only for the right number of rows."""
_ROW = schema.numpy_dtype(schema.BLOCK)
_RECORD_BYTES = HEADER_BYTES + _ROW.itemsize
_TEST_RUN = 10
_PATIENCE_SECONDS = 300.0
_CODES = {"u8": "Q", "u4": "I", "u2": "H", "u1": "B", "i4": "i"}


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Time every method; one that this machine cannot run is a note."""
    repeats = 5 if quick else 31
    patience = 0.0 if quick else _PATIENCE_SECONDS
    outcome = Outcome({"ring": f"{RING_BYTES >> 20} MiB", "record_bytes": _RECORD_BYTES})
    timed: dict[str, Interval] = {}
    say("simulated ring")
    wait_until_quiet(patience)
    memory = _SimulatedRing()
    timed["kvprobe, simulated ring"] = _timed(memory.refill, memory.ring.drain, repeats)
    unpacked = max(3, repeats // 5)
    timed["struct.iter_unpack, simulated ring"] = _timed(memory.refill, memory.unpack, unpacked)
    say("real ring")
    wait_until_quiet(patience)
    try:
        with _real_ring(RING_BYTES // 8 if quick else RING_BYTES) as (ring, fill):
            timed["kvprobe, BPF ring"] = _timed(fill, ring.drain, max(3, repeats // 3))
    except (OSError, KvprobeError) as error:
        outcome.notes.append(f"no BPF ring: {error}")
    say("callbacks of bcc")
    wait_until_quiet(patience)
    try:
        for name, samples in _callbacks(2 if quick else 7).items():
            timed[name] = median_interval(samples)
    except KvprobeError as error:
        outcome.notes.append(f"no callbacks of bcc: {error.message}")
    outcome.tables.append(_table(timed))
    outcome.aims += _aims(timed)
    outcome.notes.append("time is that of the reading thread; filling the ring is not in it")
    return outcome


def _table(timed: dict[str, Interval]) -> Table:
    ours = timed.get("kvprobe, BPF ring", timed["kvprobe, simulated ring"])
    rows: list[dict[str, Value]] = [
        {
            "method": name,
            "ns_per_row": ns,
            "rows_per_second": 1e9 / ns.mid,
            "times_kvprobe": ns.mid / ours.mid,
            "samples": ns.n,
        }
        for name, ns in timed.items()
    ]
    columns = (
        Column("method", "method"),
        Column("ns_per_row", "ns/row", ".1f"),
        Column("rows_per_second", "M rows/s", ".2f", 1e-6),
        Column("times_kvprobe", "x kvprobe", ".1f"),
        Column("samples", "samples", "d"),
    )
    return Table("one core, full ring, median [90 % interval]", columns, tuple(rows))


def _aims(timed: dict[str, Interval]) -> list[Aim]:
    aims = []
    for ring in ("simulated ring", "BPF ring"):
        ns = timed.get(f"kvprobe, {ring}")
        rate = 1e9 / ns.mid if ns else None
        aims.append(
            Aim(
                f"decode more than {AIM_ROWS_PER_SECOND / 1e6:.0f} M rows/s a core, {ring}",
                "not measured" if rate is None else f"{rate / 1e6:.1f} M rows/s",
                None if rate is None else rate > AIM_ROWS_PER_SECOND,
            )
        )
    return aims


def _timed(fill: Callable[[], int], drain: Callable[[], Rows], repeats: int) -> Interval:
    """Nanoseconds of this thread for each row.

    Raises:
        AssertionError: the rows are not those that were written.
    """
    samples = []
    for _ in range(repeats):
        written = fill()
        began = time.thread_time_ns()
        rows = drain()
        samples.append((time.thread_time_ns() - began) / max(1, len(rows)))
        assert len(rows) == written
        assert int((rows["done_ns"] - rows["queued_ns"]).sum()) == written * LATENCY_NS
    return median_interval(samples)


class _SimulatedRing:
    """Memory laid out as the kernel lays out a ring, full of finished records."""

    def __init__(self) -> None:
        record = np.dtype([("length", "<u4"), ("page", "<u4"), ("row", _ROW)])
        count = RING_BYTES // _RECORD_BYTES
        data = np.zeros(2 * RING_BYTES, np.uint8)
        self._filled = data[: count * _RECORD_BYTES]
        records = self._filled.view(record)
        records["length"] = _ROW.itemsize
        records["row"]["queued_ns"] = np.arange(count)
        records["row"]["done_ns"] = np.arange(count) + LATENCY_NS
        self._rows = records["row"]
        self._consumer = np.zeros(1, np.uint64)
        producer = np.full(1, len(self._filled), np.uint64)
        self.ring = Ring(schema.BLOCK, self._consumer, producer, data)

    def refill(self) -> int:
        """All is unread again; returns how many rows that are."""
        self._consumer[0] = 0
        return len(self._rows)

    def unpack(self) -> Rows:
        """What Python without numpy does: a tuple for each record, one column added up."""
        form = "<II" + "".join(_CODES[column.dtype] for column in schema.BLOCK.columns)
        total = 0
        for record in struct.iter_unpack(form, self._filled.data):
            total += record[2] - record[3]
        assert total == len(self._rows) * LATENCY_NS
        return self._rows


@contextmanager
def _real_ring(size_bytes: int) -> Iterator[tuple[Ring, Callable[[], int]]]:
    """A ring buffer of the kernel, and what fills it: a program that the kernel runs on request.

    Raises:
        OSError: no right to use BPF, or no ring buffers here.
        KvprobeError: no BPF on this processor.
    """
    descriptor = trial.ring_buffer(size_bytes)
    try:
        program = trial.program(_write_one_row(descriptor))
        try:
            ring = Ring.of_map(schema.BLOCK, descriptor, size_bytes)
            request = struct.pack("=IIIIQQ", program, 0, 0, 0, 0, 0)

            count = size_bytes // _RECORD_BYTES

            def fill() -> int:
                for _ in range(count):
                    attach.bpf(_TEST_RUN, request)
                return count

            try:
                yield ring, fill
            finally:
                ring.close()
        finally:
            os.close(program)
    finally:
        os.close(descriptor)


def _write_one_row(ring: int) -> bytes:
    """``struct kv_block row = {.done_ns = LATENCY_NS}; bpf_ringbuf_output(&ring, &row, ..)``."""
    size = _ROW.itemsize

    def code(operation: int, registers: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("<BBhi", operation, registers, offset, value)

    words = [0] * (size // 8)
    words[_ROW.names.index("done_ns") if _ROW.names else 0] = LATENCY_NS
    stores = b"".join(code(0x7A, 10, 8 * i - size, word) for i, word in enumerate(words))
    return (
        stores
        + code(0x18, 1 | 1 << 4, 0, ring)  # r1 = the map, two instructions long
        + code(0)
        + code(0xBF, 2 | 10 << 4)  # r2 = r10
        + code(0x07, 2, 0, -size)  # r2 += -size
        + code(0xB7, 3, 0, size)  # r3 = size
        + code(0xB7, 4, 0, 1)  # r4 = BPF_RB_NO_WAKEUP
        + code(0x85, 0, 0, 130)  # call bpf_ringbuf_output
        + trial.DO_NOTHING
    )


def _callbacks(repeats: int) -> dict[str, list[float]]:
    """Nanoseconds for each row with bcc's callbacks, measured in a process of its own.

    Raises:
        KvprobeError: bcc does not work here.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals.callbacks", str(repeats)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=300,
    )
    if done.returncode:
        raise KvprobeError(reason(done.stderr))
    measured: dict[str, list[float]] = json.loads(done.stdout)
    return measured
