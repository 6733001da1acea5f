"""A storage device and an engine as a small event simulation: an independent source of truth.

A read passes one of ``servers`` (seek, translation, network) for about ``alpha`` and then a shared
link of ``beta`` bytes/s, first come first served. Nothing here knows the formulas under test.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, replace

import numpy as np

from kvprobe.model import EngineFacts, Facts, RestoreSample, ServiceCell


@dataclass(frozen=True)
class World:
    alpha_ns: float
    beta_bytes_per_ns: float
    servers: int
    pause_ns: float
    """Software time of the engine before each read."""
    one_thread: bool
    """All pauses of a request are done by one thread."""
    slots: int
    prefill_ns: float
    reads: int
    read_bytes: int
    in_flight: int
    noise: float = 0.15


class Device:
    """Servers and a link; calls must come in order of time."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world, self._dice = world, dice
        self._free = [0.0] * world.servers
        self._link = 0.0

    def read(self, now: float, size: int) -> float:
        begin = max(now, heapq.heappop(self._free))
        done = begin + self._world.alpha_ns * self._dice.lognormvariate(0, self._world.noise)
        heapq.heappush(self._free, done)
        self._link = max(self._link, done) + size / self._world.beta_bytes_per_ns
        return self._link


def rate(world: World, size: int, depth: int, seed: int, reads: int = 300) -> float:
    """Bytes/s of a benchmark that keeps ``depth`` reads outstanding."""
    dice = random.Random(seed)
    device = Device(world, dice)
    ready = [0.0] * depth
    last = 0.0
    for _ in range(reads):
        last = device.read(heapq.heappop(ready), size)
        heapq.heappush(ready, last)
    return reads * size / last * 1e9 * dice.lognormvariate(0, 0.02)


@dataclass(frozen=True)
class Run:
    """Restores of a run: begin, end and the (start, end) of each read; ns."""

    restores: tuple[tuple[float, float, tuple[tuple[float, float], ...]], ...]

    @property
    def mean_ns(self) -> float:
        return float(np.mean([end - begin for begin, end, _ in self.restores]))


def run(world: World, seed: int, restores: int = 60) -> Run:
    """Requests in ``slots``: restore, prefill, next."""
    dice = random.Random(seed)
    device = Device(world, dice)
    found: list[tuple[float, float, tuple[tuple[float, float], ...]]] = []
    # Events in order of time: a reader of a request is about to begin its pause, or its read.
    queue: list[tuple[float, int, str, int]] = []
    left: dict[int, int] = {}
    thread: dict[int, float] = {}
    reads: dict[int, list[tuple[float, float]]] = {}
    number = 0

    def begin(now: float) -> None:
        nonlocal number
        request, number = number, number + 1
        left[request], thread[request], reads[request] = world.reads, now, []
        for reader in range(min(world.in_flight, world.reads)):
            heapq.heappush(queue, (now + reader, request, "pause", reader))

    for slot in range(world.slots):
        begin(slot * world.prefill_ns / world.slots)
    while len(found) < restores:
        now, request, what, reader = heapq.heappop(queue)
        if what == "pause":
            if left[request] <= 0:
                continue
            left[request] -= 1
            start = max(now, thread[request]) if world.one_thread else now
            ready = start + world.pause_ns * dice.lognormvariate(0, world.noise)
            thread[request] = ready
            heapq.heappush(queue, (ready, request, "read", reader))
        elif what == "read":
            done = device.read(now, world.read_bytes)
            reads[request].append((now, done))
            heapq.heappush(queue, (done, request, "pause", reader))
            if len(reads[request]) == world.reads:
                mine = reads.pop(request)
                first, end = min(a for a, _ in mine), max(b for _, b in mine)
                found.append((first, end, tuple(mine)))
                wait = end + world.prefill_ns * dice.lognormvariate(0, world.noise)
                heapq.heappush(queue, (wait, number + 1_000_000, "next", 0))
        else:
            begin(now)
    return Run(tuple(found))


def facts(world: World, seen: Run, seed: int, sizes: list[int], depths: list[int]) -> Facts:
    """What kvprobe would know: the run's restores and a sweep's cells."""
    cells = [cell(world, size, depth, seed) for size in sizes for depth in depths]
    parts = [_split(first, end, reads) for first, end, reads in seen.restores]
    busy, idle, opened = (sum(column) for column in zip(*parts, strict=True))
    restore_ns = sum(end - begin for begin, end, _ in seen.restores)
    n = len(seen.restores)
    return Facts(
        engine=EngineFacts(
            "simulated", unit_bytes=world.read_bytes, reads_in_flight=world.in_flight, direct=True
        ),
        device=None,
        restore=RestoreSample(
            n=n,
            bytes=n * world.reads * world.read_bytes,
            ops=n * world.reads,
            restore_ns=round(restore_ns),
            device_ns=round(busy),
            block_queue_ns=0,
            software_ns=0,
            idle_ns=round(idle),
            ttft_ns=round(restore_ns + n * world.prefill_ns),
            effective_depth=opened / busy,
            restoring_at_once=_at_once(seen),
        ),
        surface=tuple(cells),
    )


def cell(world: World, size: int, depth: int, seed: int) -> ServiceCell:
    """Three repeats with their 90 % t interval, as a sweep makes it."""
    logs = np.log([rate(world, size, depth, seed * 7919 + i) for i in range(3)])
    mid, half = float(logs.mean()), 2.92 * float(logs.std(ddof=1)) / math.sqrt(3)
    return ServiceCell(
        size, depth, True, math.exp(mid), math.exp(mid - half), math.exp(mid + half), 3, "sweep"
    )


def _split(
    first: float, end: float, reads: tuple[tuple[float, float], ...]
) -> tuple[float, float, float]:
    """Time with a read open, time without, and the sum of all reads' times."""
    covered, reach = 0.0, first
    for start, stop in sorted(reads):
        covered += max(0.0, stop - max(reach, start))
        reach = max(reach, stop)
    return covered, end - first - covered, sum(b - a for a, b in reads)


def _at_once(seen: Run) -> float:
    """Mean number of requests restoring, over the time of all restores."""
    spans = [(begin, end) for begin, end, _ in seen.restores]
    together = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in spans)
    return together / sum(b - a for a, b in spans)


def random_world(seed: int) -> tuple[World, World]:
    """A world badly set, and the same with other settings."""
    dice = random.Random(seed)
    alpha = math.exp(dice.uniform(math.log(30e3), math.log(1e6)))
    bad = World(
        alpha_ns=alpha,
        beta_bytes_per_ns=math.exp(dice.uniform(math.log(0.3), math.log(5))),
        servers=dice.choice((2, 4, 8, 16, 32)),
        pause_ns=alpha * dice.uniform(0.02, 0.8),
        one_thread=dice.random() < 0.3,
        slots=dice.choice((1, 1, 2, 3)),
        prefill_ns=dice.uniform(5e6, 60e6),
        reads=dice.choice((16, 24, 40, 64)),
        read_bytes=dice.choice((16384, 65536, 131072)),
        in_flight=dice.choice((1, 1, 1, 2)),
    )
    growth = dice.choice((1, 1, 2, 4))
    depth = dice.choice((1, 2, 4, 8) if growth > 1 else (2, 4, 8, 16))
    good = replace(
        bad,
        reads=max(1, bad.reads // growth),
        read_bytes=bad.read_bytes * growth,
        in_flight=max(depth, bad.in_flight),
    )
    return bad, good
