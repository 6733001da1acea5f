"""In-kernel aggregates of the block probe as rows: time at depth, size x latency histogram.

The kernel keeps running sums (``probes/block_aggregates.bpf.h``); this module takes the difference
between two readings. Its bucket edges are those of the C code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvprobe import schema
from kvprobe.bpf import maps
from kvprobe.model import Rows

DEPTHS = 256
SIZES = 18
LATENCIES = 121
DIRECTIONS = 2
_OPEN = 2**63 - 1
"""Upper edge of the last, open latency bucket."""
_NO_QUEUE = 2**32 - 1


def size_edges() -> NDArray[np.int64]:
    """Lower edge of each size bucket, bytes: 0, 512, 1024 ... 32 MiB."""
    return np.array([0] + [1 << bit for bit in range(9, 9 + SIZES - 1)], np.int64)


def latency_edges() -> NDArray[np.int64]:
    """Lower edge of each latency bucket, ns: 0, then four per power of two from 1024, then open."""
    edges = [0]
    for step in range(LATENCIES - 1):
        bit, quarter = 10 + step // 4, step % 4
        edges.append((1 << bit) + quarter * (1 << (bit - 2)))
    return np.array([*edges, _OPEN], np.int64)


class Aggregates:
    """Differences of the kernel's sums between two calls of ``read``.

    Args:
        descriptors: map name -> descriptor, of the loaded probes.
        start_ns: since when the kernel side counts.
    """

    def __init__(self, descriptors: Mapping[str, int], start_ns: int) -> None:
        self._maps = descriptors
        self._since_ns = start_ns
        self._depth: dict[int, NDArray[np.int64]] = {}
        self._cells: dict[int, NDArray[np.int64]] = {}
        self._attached_ns = start_ns
        self._sizes, self._latencies = size_edges(), latency_edges()
        self.requests = 0

    def read(self, now_ns: int) -> dict[str, Rows]:
        """Rows of ``depth`` and ``histogram`` for the time since the last call; zeros left out."""
        depth, histogram = [], []
        for device, queues in self._devices():
            for direction in range(DIRECTIONS):
                queue = queues + direction
                depth.append(self._depth_rows(queue, device, direction, now_ns))
                histogram.append(self._histogram_rows(queue, device, direction, now_ns))
        self._since_ns = now_ns
        return {
            "depth": _joined(schema.DEPTH, depth),
            "histogram": _joined(schema.HISTOGRAM, histogram),
        }

    def _devices(self) -> list[tuple[int, int]]:
        found = []
        for key in maps.keys(self._maps["block_devices"], 4):
            value = maps.lookup(self._maps["block_devices"], key, 4)
            if value is not None and struct.unpack("=I", value)[0] != _NO_QUEUE:
                found.append((struct.unpack("=I", key)[0], struct.unpack("=I", value)[0]))
        return sorted(found)

    def _depth_rows(self, queue: int, device: int, direction: int, now_ns: int) -> Rows:
        words = maps.array_element(self._maps["block_depth"], queue, 2 + DEPTHS)
        last_ns, depth = int(words[0]) or self._attached_ns, int(words[1])
        total = words[2:].astype(np.int64)
        # The time since the last change has not been added in the kernel yet; of a change that
        # came after now, the time beyond it was added already.
        total[min(depth, DEPTHS - 1)] += now_ns - last_ns
        before = self._depth.get(queue, self._never_used())
        delta = total - before
        self._depth[queue] = np.maximum(total, before)  # what is below zero waits for the next call
        at = np.flatnonzero(delta > 0)
        rows = self._rows(schema.DEPTH, len(at), device, direction, now_ns)
        rows["depth"], rows["time_ns"] = at, delta[at]
        return rows

    def _never_used(self) -> NDArray[np.int64]:
        """Sums of a queue that was idle up to the last call: the kernel adds that time later."""
        total = np.zeros(DEPTHS, np.int64)
        total[0] = self._since_ns - self._attached_ns
        return total

    def _histogram_rows(self, queue: int, device: int, direction: int, now_ns: int) -> Rows:
        words = maps.array_element(self._maps["block_histogram"], queue, 2 * SIZES * LATENCIES)
        cells = words.astype(np.int64).reshape(SIZES, LATENCIES, 2)
        delta = cells - self._cells.get(queue, np.zeros_like(cells))
        self._cells[queue] = cells
        size, latency = np.nonzero(delta[:, :, 0])
        rows = self._rows(schema.HISTOGRAM, len(size), device, direction, now_ns)
        rows["size_low_bytes"] = self._sizes[size]
        rows["latency_low_ns"] = self._latencies[latency]
        rows["latency_high_ns"] = self._latencies[latency + 1]
        rows["requests"] = delta[size, latency, 0]
        rows["bytes"] = delta[size, latency, 1]
        self.requests += int(rows["requests"].sum())
        return rows

    def _rows(
        self, table: schema.Table, count: int, device: int, direction: int, now_ns: int
    ) -> Rows:
        rows = np.zeros(count, schema.numpy_dtype(table))
        rows["start_ns"], rows["end_ns"] = self._since_ns, now_ns
        rows["device"], rows["direction"] = device, direction
        return rows


def _joined(table: schema.Table, parts: list[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.zeros(0, schema.numpy_dtype(table))
