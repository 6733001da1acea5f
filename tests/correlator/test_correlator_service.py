"""Service surface and Little's law against a simulated device of known speed."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import correlate, service
from kvprobe.correlator.ledger import DeviceAccount
from kvprobe.model import DeviceFacts, Frame, Loss
from kvprobe.schema import TABLES, OpKind
from tests.correlator.rows import DISK, block, frame, op, opened
from tests.correlator.simulate import DEVICE, Node

Rows = list[dict[str, Any]]
ALPHA_NS, NS_PER_BYTE, SIZE = 100_000, 0.5, 65536


def response_ns(depth: int) -> float:
    """A device with a fixed time a request and one channel that all requests share."""
    return ALPHA_NS + depth * SIZE * NS_PER_BYTE


def closed_loop(depths: list[int], reads: int, jitter: float = 0.0) -> Rows:
    """Reads with a constant number in flight, one phase after another."""
    rng = np.random.default_rng(3)
    rows, now = [], 1_000_000
    for depth in depths:
        free = [now + round(i * response_ns(depth) / depth) for i in range(depth)]
        for _ in range(reads // depth):
            for slot in range(depth):
                end = free[slot] + round(response_ns(depth) * rng.uniform(1 - jitter, 1 + jitter))
                rows.append(op(free[slot], end, requested=SIZE, tid=slot))
                free[slot] = end
        now = max(free) + 5_000_000
    return rows


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
def test_the_rate_at_a_depth(depth: int) -> None:
    cells = service.surface(frame("ops", closed_loop([depth], 800, 0.2)))
    cell = next(c for c in cells if c.depth == depth)
    rate = depth * SIZE / response_ns(depth) * 1e9
    assert cell.bytes_per_s == pytest.approx(rate, rel=0.03)
    assert cell.low_bytes_per_s <= cell.bytes_per_s <= cell.high_bytes_per_s
    assert (cell.size_bytes, cell.direct, cell.source) == (SIZE, True, "capture")
    assert cell.n >= service.MIN_SLICES


def test_phases_of_several_depths_give_a_cell_each() -> None:
    cells = service.surface(frame("ops", closed_loop([1, 4, 8], 600)))
    rates = {c.depth: c.bytes_per_s for c in cells}
    for depth in (1, 4, 8):
        want = depth * SIZE / response_ns(depth) * 1e9
        assert rates[depth] == pytest.approx(want, rel=0.02)


def test_no_cell_without_enough_reads_of_one_size() -> None:
    few = closed_loop([1], 29)
    assert service.surface(frame("ops", few)) == ()
    mixed = closed_loop([1], 200)
    for row in mixed[::7]:
        row["result"] = 4096
    assert service.surface(frame("ops", mixed)) == ()
    writes = [row | {"kind": OpKind.WRITE} for row in closed_loop([1], 200)]
    assert service.surface(frame("ops", writes)) == ()
    assert service.surface(frame("ops", [])) == ()


def test_a_rate_seen_in_too_few_slices_is_no_cell() -> None:
    rows = closed_loop([1], 400)
    rows += [row | {"tid": 99} for row in rows[200:203]]
    assert {c.depth for c in service.surface(frame("ops", rows))} == {1}


def depth_table(rows: Rows, window: tuple[int, int]) -> Frame:
    """What the kernel's sums would be: time at each depth, per direction, second by second."""
    out = []
    for direction in (0, 1):
        mine = [r for r in rows if r["op"] == direction]
        edges = sorted({*window, *(r["queued_ns"] for r in mine), *(r["done_ns"] for r in mine)})
        for low, high in itertools.pairwise(edges):
            level = sum(r["queued_ns"] <= low < r["done_ns"] for r in mine)
            out.append(
                {
                    "start_ns": window[0],
                    "end_ns": window[1],
                    "device": DISK,
                    "direction": direction,
                    "depth": level,
                    "time_ns": high - low,
                }
            )
    return frame("depth", out)


def requests_of_a_disk(n: int = 211) -> Rows:
    rng = np.random.default_rng(5)
    rows, now = [], 1_000_000
    for _ in range(n):
        now += int(rng.integers(10_000, 200_000))
        done = now + int(rng.integers(50_000, 500_000))
        rows.append(block(now, done, op=int(rng.random() < 0.3)))
    return rows


def devices(rows: Rows, depth: Frame) -> tuple[DeviceAccount, ...]:
    facts = [DeviceFacts(DISK, "loop3", "loop")]
    return service.account_devices(facts, frame("block", rows), depth, (), DISK)


def test_littles_law_holds_when_every_row_is_there_and_not_when_some_are_missing() -> None:
    rows = requests_of_a_disk()
    window = (0, max(r["done_ns"] for r in rows))
    depth = depth_table(rows, window)
    (device,) = devices(rows, depth)
    assert device.little_ratio == pytest.approx(1, rel=0.02)
    assert device.little_n == 211
    (thinned,) = devices(rows[::2], depth)
    assert thinned.little_ratio == pytest.approx(0.5, rel=0.1)


def test_depth_figures_are_those_of_the_kernel() -> None:
    rows = requests_of_a_disk()
    window = (0, max(r["done_ns"] for r in rows))
    (device,) = devices(rows, depth_table(rows, window))
    reads = [r for r in rows if r["op"] == 0]
    total = sum(r["done_ns"] - r["queued_ns"] for r in reads)
    assert device.mean_depth == pytest.approx(total / window[1])
    at = np.arange(0, window[1], 997)
    level = sum(((r["queued_ns"] <= at) & (at < r["done_ns"])).astype(int) for r in reads)
    assert device.time_at_zero_share == pytest.approx(float(np.mean(level == 0)), abs=0.01)
    assert device.p99_depth == np.quantile(level, 0.99, method="inverted_cdf")


def test_counts_bytes_and_latency() -> None:
    rows = requests_of_a_disk()
    (device,) = devices(rows, frame("depth", []))
    reads = [r for r in rows if r["op"] == 0]
    assert (device.reads, device.writes) == (len(reads), len(rows) - len(reads))
    assert device.read_bytes == 4096 * len(reads)
    latency = [r["done_ns"] - r["queued_ns"] for r in reads]
    assert device.read_latency_ns
    assert device.read_latency_ns.mid == np.median(latency)
    assert device.mean_depth is device.little_ratio is device.p99_depth is None


def test_the_device_of_the_cache_comes_first_and_the_unknown_has_a_name() -> None:
    rows = [op(5, 40), op(50, 90), op(100, 150)]
    blocks = [block(10, 20, device=1 << 20, inode=8), block(10, 30), block(60, 80)]
    blocks.append(block(15, 17, device=0) | {"inode": None})  # a controller's own
    lookups = [opened("/kv/a.bin", 1, 7)]
    frames = {"ops": rows, "block": blocks, "lookups": lookups}
    manifest = Manifest("t", "c", 0, 200, Clock(0), devices=(DeviceFacts(DISK, "loop3", "loop"),))
    found = correlate(FixedTables(manifest, {n: frame(n, r) for n, r in frames.items()})).devices
    assert [d.facts.name for d in found] == ["loop3", "1:0"]
    assert found[1].read_bytes == 4096


def test_losses_leave_the_check_without_a_verdict() -> None:
    node = Node(3, 4, requests=29).run()
    tables = node.capture()
    start, end = tables.manifest.window_ns
    total = sum(r["done_ns"] - r["queued_ns"] for r in node.tables["block"])
    half = total // 2
    levels = [{"depth": 0, "time_ns": end - start - half}, {"depth": 2, "time_ns": half}]
    about = {"start_ns": start, "end_ns": end, "device": DEVICE, "direction": 0}
    frames = {name: tables.frame(name) for name in TABLES}
    frames["depth"] = frame("depth", [level | about for level in levels])
    (device,) = correlate(FixedTables(tables.manifest, frames)).devices
    assert device.little_ratio == pytest.approx(1, rel=0.001)
    lossy = replace(tables.manifest, losses={"block": Loss(rows=100, lost=1)})
    (device,) = correlate(FixedTables(lossy, frames)).devices
    assert device.little_ratio is None
    assert device.mean_depth is not None


def test_a_flush_is_no_write() -> None:
    """A request of op write that moves nothing: the load leaves it out, and so does this count."""
    rows = requests_of_a_disk()
    flushes = [block(r["done_ns"], r["done_ns"] + 7, op=1, bytes=0) for r in rows[:13]]
    (plain,), (flushed,) = (
        devices(some, depth_table([], (0, 1))) for some in (rows, rows + flushes)
    )
    assert (flushed.writes, flushed.write_bytes) == (plain.writes, plain.write_bytes)
    assert flushed.reads == plain.reads
