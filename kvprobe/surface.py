"""The service surface: how long one read takes, by its size and by the depth it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvprobe.model import ServiceCell

SAME = 1.1
"""Sizes or depths within 10 % are one: rates there differ less than repeats of one cell do."""


class Response(NamedTuple):
    """Time of one read in ns with its 90 % interval."""

    mid: float
    low: float
    high: float


class Surface:
    """Response times by read size and depth, interpolated in measured cells and never beyond.

    A cell of rate X at size s and depth x has response time x*s/X (Little's law). Times are
    interpolated linearly, because both laws are lines in time: alpha + s/beta along the size, and
    along the depth a constant below saturation and x*s/X beyond.
    """

    def __init__(self, cells: Iterable[ServiceCell]) -> None:
        self._rows: dict[int, list[tuple[float, Response]]] = {}
        for cell in sorted(cells, key=lambda cell: (cell.size_bytes, cell.depth)):
            rates = (cell.bytes_per_s, cell.high_bytes_per_s, cell.low_bytes_per_s)
            if min(cell.size_bytes, cell.depth, *rates) > 0 and math.isfinite(max(rates)):
                held_ns = cell.size_bytes * cell.depth * 1e9
                times = Response(*(held_ns / rate for rate in rates))
                self._rows.setdefault(cell.size_bytes, []).append((cell.depth, times))

    def response(self, size_bytes: float, depth: float) -> Response | None:
        """Time of one read of that size at that depth; None outside what was measured."""
        rows = [(size, _interpolate(row, depth)) for size, row in self._rows.items()]
        return _interpolate([(size, time) for size, time in rows if time], size_bytes)


def _interpolate(points: Sequence[tuple[float, Response]], at: float) -> Response | None:
    """Linear between the two neighbours of ``at``; points ascend."""
    below = [point for point in points if point[0] <= at]
    above = [point for point in points if point[0] >= at]
    if not below or not above:
        edge = above[:1] or below[-1:]
        near = edge and max(edge[0][0] / at, at / edge[0][0]) <= SAME
        return edge[0][1] if near else None
    (low, first), (high, last) = below[-1], above[0]
    if low == high:
        return first
    weight = (at - low) / (high - low)
    return Response(*(a + (b - a) * weight for a, b in zip(first, last, strict=True)))
