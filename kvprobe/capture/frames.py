"""From rows to frames: the one place where a raw null becomes -1 and a C string becomes str."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.typed_json import printable
from kvprobe.model import Frame, Rows
from kvprobe.schema import UNKNOWN, Column, Table

_I64_MAX = 2**63 - 1


def empty_frame(table: Table) -> Frame:
    """A frame of no rows with every column of ``table``."""
    return {c.name: np.empty(0, _frame_dtype(c)) for c in table.all_columns}


def frame_from_rows(table: Table, rows: Rows) -> Frame:
    """A frame from kernel rows. Derived columns are unknown; the recogniser fills them later."""
    frame = {c.name: frame_column(c, rows[c.name]) for c in table.columns}
    for column in table.derived:
        frame[column.name] = unknown_column(column, len(rows))
    return frame


def frame_from_dicts(table: Table, rows: Iterable[Mapping[str, Any]]) -> Frame:
    """A frame from dicts; an absent key or None is unknown."""
    kept = list(rows)
    return {c.name: _column_from_dicts(c, kept) for c in table.all_columns}


def select(frame: Frame, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Frame:
    """Some rows of a frame: a mask, indices in the wanted order, or a slice."""
    return {name: column[rows] for name, column in frame.items()}


def concat_frames(table: Table, frames: Iterable[Frame]) -> Frame:
    """The frames one after another."""
    parts = list(frames)
    if not parts:
        return empty_frame(table)
    if len(parts) == 1:
        return parts[0]
    return {c.name: np.concatenate([p[c.name] for p in parts]) for c in table.all_columns}


def frame_length(frame: Frame) -> int:
    """Number of rows."""
    return len(next(iter(frame.values())))


def frame_column(column: Column, raw: NDArray[Any]) -> NDArray[Any]:
    """One raw column as a frame column: the raw null, and what int64 cannot hold, become -1."""
    if column.dtype[0] == "S":
        return text_column(raw)
    if column.dtype[0] in "Of":
        return np.ascontiguousarray(raw)
    values = raw.astype(np.int64)
    if column.null is not None:
        values[raw == column.null] = UNKNOWN
    if column.dtype == "u8":
        values[raw > _I64_MAX] = UNKNOWN
    return values


def text_column(raw: Iterable[bytes | None]) -> NDArray[Any]:
    """C strings as str, cut at the first NUL; what is not UTF-8 or not printable is escaped."""
    cache: dict[bytes | None, str | None] = {None: None}
    out = []
    for value in raw.tolist() if isinstance(raw, np.ndarray) else raw:
        text = cache.get(value)
        if text is None and value is not None:
            text = printable(value.split(b"\0", 1)[0].decode("utf-8", "backslashreplace"))
            cache[value] = text
        out.append(text)
    return object_array(out)


def object_array(values: list[Any]) -> NDArray[Any]:
    """A one-dimensional object array of ``values``, whatever they are."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def unknown_column(column: Column, length: int) -> NDArray[Any]:
    """``length`` unknown values of a column."""
    dtype = _frame_dtype(column)
    if dtype == np.dtype(object):
        return np.full(length, None, dtype=object)
    return np.full(length, UNKNOWN if dtype.kind == "i" else np.nan, dtype=dtype)


def _frame_dtype(column: Column) -> np.dtype[Any]:
    kind = column.dtype[0]
    return np.dtype(object if kind in "OS" else np.float64 if kind == "f" else np.int64)


def _column_from_dicts(column: Column, rows: list[Mapping[str, Any]]) -> NDArray[Any]:
    dtype = _frame_dtype(column)
    unknown: Any = None if dtype == np.dtype(object) else np.nan if dtype.kind == "f" else UNKNOWN
    values = [unknown if (v := row.get(column.name)) is None else v for row in rows]
    return object_array(values) if dtype == np.dtype(object) else np.array(values, dtype=dtype)
