"""Rows of ``gpu`` as packed records: what a sampler thread makes, and what a poll takes away."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable

import numpy as np

from kvprobe.model import Rows
from kvprobe.schema import GPU, UNKNOWN, numpy_dtype

_PLACES = {column.name: place for place, column in enumerate(GPU.columns)}
_IS_WHOLE = [column.dtype == "i8" for column in GPU.columns]
_NOTHING: list[float | int] = [UNKNOWN if whole else math.nan for whole in _IS_WHOLE]
_RECORD = struct.Struct("<" + "".join("q" if whole else "d" for whole in _IS_WHOLE))
_FIRST = _PLACES["instance"] + 1
"""Columns before this one say what a row is about."""


def places_of(columns: Iterable[str]) -> tuple[int, ...]:
    """Where these columns are in a row.

    Raises:
        KeyError: the table has no such column.
    """
    return tuple(_PLACES[name] for name in columns)


class RowStore:
    """Rows that were made and not yet taken; any thread may add."""

    def __init__(self) -> None:
        self._records: deque[bytes] = deque()

    def add(
        self,
        subject: tuple[int, int],
        span_ns: tuple[int, int],
        uncertainty_ns: int,
        places: tuple[int, ...],
        values: Iterable[float],
    ) -> None:
        """Add one row.

        Args:
            subject: device index and MIG instance (``UNKNOWN``: all of it).
            span_ns: begin (``UNKNOWN``: a moment) and end of the time it is about.
            uncertainty_ns: how far the end may be off.
            places: where the values go, see ``places_of``.
            values: in the columns' units; nan is unknown.
        """
        row = _NOTHING.copy()
        start_ns, time_ns = span_ns
        row[:_FIRST] = (time_ns, start_ns, uncertainty_ns, *subject)
        for place, value in zip(places, values, strict=True):
            row[place] = value
        self._records.append(_RECORD.pack(*row))

    def take(self) -> Rows:
        """The rows added since the last call, in the order in which they were made."""
        count = len(self._records)
        data = b"".join(self._records.popleft() for _ in range(count))
        return np.frombuffer(data, numpy_dtype(GPU))
