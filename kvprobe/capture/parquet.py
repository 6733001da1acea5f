"""One table as Parquet: written from an analysis frame and read back as one.

Column types follow ``schema``; unknown is a real null. A reader takes any file whose columns have
the expected types: further columns are ignored, a missing column is unknown where the schema
allows that. Only this module and its callers at the end of a recording import pyarrow.
"""

from __future__ import annotations

from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvprobe.capture.frames import empty_frame, frame_length, text_column, unknown_column
from kvprobe.model import Frame
from kvprobe.schema import UNKNOWN, Column, Table

MAX_ROWS = 200_000_000
MAX_BYTES = 32 << 30
"""Largest decoded size of one table; also bounded by ``MAX_RATIO`` times its stored size."""
MAX_RATIO = 500
_SMALL_BYTES = 64 << 20
_BATCH_ROWS = 1 << 17

_ARROW: dict[str, pa.DataType] = {
    "u8": pa.uint64(),
    "u4": pa.uint32(),
    "u2": pa.uint16(),
    "u1": pa.uint8(),
    "i4": pa.int32(),
    "i8": pa.int64(),
    "f8": pa.float64(),
    "O": pa.string(),
    "S": pa.string(),
}


class DamagedTable(Exception):
    """This is not a table that the schema describes; the text says why."""


def arrow_type(column: Column) -> pa.DataType:
    """The stored type of a column."""
    return _ARROW["S" if column.dtype[0] == "S" else column.dtype]


def nullable(table: Table, column: Column) -> bool:
    """Whether this column may be unknown."""
    return column.null is not None or not table.kernel or column in table.derived


# ---------------------------------------------------------------- writing


class TableWriter:
    """Writes one table to an open file in row groups of a bounded size.

    ``derived`` says whether the derived columns are stored too (a redacted capture needs them).
    """

    def __init__(self, file: IO[bytes], table: Table, derived: bool = False) -> None:
        self.rows = 0
        self._table = table
        self._columns = table.all_columns if derived else table.columns
        self._schema = pa.schema([(c.name, arrow_type(c)) for c in self._columns])
        self._waiting: list[pa.RecordBatch] = []
        # Times grow steadily: differences are a third of their size and cost less than a
        # dictionary. Everything else repeats a lot, sectors excepted.
        times = [c.name for c in self._columns if c.unit == "ns" and c.dtype in ("u8", "i8")]
        plain = {*times, "sector"}
        self._writer = pq.ParquetWriter(
            pa.PythonFile(cast(Any, file), mode="w"),
            self._schema,
            store_schema=False,
            compression="zstd",
            compression_level=3,
            use_dictionary=cast(Any, [c.name for c in self._columns if c.name not in plain]),
            column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
        )

    def write(self, frame: Frame) -> None:
        """Append the rows of a frame."""
        for first in range(0, frame_length(frame), _BATCH_ROWS):
            part = {name: values[first : first + _BATCH_ROWS] for name, values in frame.items()}
            arrays = [_to_arrow(self._table, c, part[c.name]) for c in self._columns]
            self._waiting.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self.rows += len(arrays[0])
            if sum(batch.num_rows for batch in self._waiting) >= _BATCH_ROWS:
                self._flush()

    def close(self) -> None:
        """Write what waits, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting).combine_chunks())
            self._waiting.clear()


def _to_arrow(table: Table, column: Column, values: NDArray[Any]) -> pa.Array[Any]:
    """An Arrow array from buffers: ``pa.array`` would import pandas where that is installed."""
    kind = arrow_type(column)
    if values.dtype == object:
        known = np.array([value is not None for value in values], dtype=bool)
        encoded = [b"" if value is None else value.encode() for value in values]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        content = [pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(encoded))]
    elif values.dtype.kind == "f":
        known = ~np.isnan(values)
        content = [pa.py_buffer(values.tobytes())]
    else:
        # Only where unknown is possible is -1 unknown: in ``result`` it is an errno.
        known = values != UNKNOWN if nullable(table, column) else np.ones(len(values), dtype=bool)
        content = [pa.py_buffer(values.astype(column.dtype).tobytes())]
    validity = (
        None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
    )
    return pa.Array.from_buffers(kind, len(values), [validity, *content])


# ---------------------------------------------------------------- reading


def read_table(data: bytes, table: Table) -> tuple[Frame, dict[str, int]]:
    """The frame of a Parquet file, and per column how many values int64 cannot hold.

    Such values can only come from damage; they are unknown in the frame, as are the columns
    that the file does not have and need not have.

    Raises:
        DamagedTable: not Parquet, too large, or not the columns of ``table``.
    """
    # The bytes may be anybody's, and pyarrow raises whatever its many layers raise.
    try:
        return _read(data, table)
    except DamagedTable:
        raise
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise DamagedTable(f"{type(error).__name__}: {line}") from error


def _read(data: bytes, table: Table) -> tuple[Frame, dict[str, int]]:
    file = pq.ParquetFile(pa.BufferReader(data))
    _check_size(file.metadata, len(data))
    stored = {field.name: field.type for field in file.schema_arrow}
    if len(stored) != len(file.schema_arrow):
        raise DamagedTable("a column appears twice")
    wanted = [c for c in table.all_columns if c.name in stored]
    for column in wanted:
        if stored[column.name] != arrow_type(column):
            raise DamagedTable(f"column {column.name} has type {stored[column.name]}")
    content = file.read(columns=[c.name for c in wanted])
    if content.num_rows == 0:
        return empty_frame(table), {}
    frame: Frame = {}
    beyond: dict[str, int] = {}
    for column in table.all_columns:
        if column.name not in stored:
            if not nullable(table, column):
                raise DamagedTable(f"column {column.name} is missing")
            frame[column.name] = unknown_column(column, content.num_rows)
    for column in wanted:
        values = content[column.name].combine_chunks()
        frame[column.name], count = _from_arrow(column, values)
        if count:
            beyond[column.name] = count
    return frame, beyond


def _check_size(metadata: pq.FileMetaData, stored_bytes: int) -> None:
    """Bound what decoding will allocate, from the file's own word for it."""
    if metadata.num_rows > MAX_ROWS:
        raise DamagedTable(f"{metadata.num_rows} rows, more than {MAX_ROWS}")
    decoded = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    # A constant column decodes to far more than it stores: count the values too.
    decoded += 8 * metadata.num_rows
    if decoded > min(MAX_BYTES, max(_SMALL_BYTES, MAX_RATIO * stored_bytes)):
        raise DamagedTable(f"{stored_bytes} bytes would become {decoded}")


def _from_arrow(column: Column, values: pa.Array[Any]) -> tuple[NDArray[Any], int]:
    """A frame's column, and how many values int64 cannot hold; read from the Arrow buffers."""
    validity, *content = values.buffers()
    known = np.ones(len(values), dtype=bool)
    if validity is not None:
        bits = np.unpackbits(np.frombuffer(memoryview(validity), np.uint8), bitorder="little")
        known = bits[values.offset : values.offset + len(values)].astype(bool)
    if column.dtype[0] in "SO":
        return _text_from_arrow(values.offset, known, *content), 0
    raw = np.frombuffer(memoryview(content[0] or b""), column.dtype)
    raw = raw[values.offset : values.offset + len(values)]
    if column.dtype[0] == "f":
        return np.where(known, raw, np.nan), 0
    result = raw.astype(np.int64)
    result[~known] = UNKNOWN
    if column.dtype != "u8":
        return result, 0
    beyond = known & (raw > np.iinfo(np.int64).max)
    result[beyond] = UNKNOWN
    return result, int(np.count_nonzero(beyond))


def _text_from_arrow(
    offset: int, known: NDArray[np.bool_], ends: pa.Buffer | None, text: pa.Buffer | None
) -> NDArray[Any]:
    places = np.frombuffer(memoryview(ends or bytes(4)), np.int32)[
        offset : offset + len(known) + 1
    ].tolist()
    data = b"" if text is None else text.to_pybytes()
    return text_column(
        data[start:end] if there else None
        for start, end, there in zip(places, places[1:], known.tolist(), strict=False)
    )
