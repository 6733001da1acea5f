"""Segment files: what a recording leaves on disk while it runs, about one a second.

A segment is one header line and then, per table, the records as they came: fixed columns as one
packed array, C strings joined by NUL, dicts as JSON. Recording this way costs a checksum and a
write; Parquet is made when the recording is over and nobody is being measured any more.

The header carries the columns, so a newer schema can read it, and a checksum of each part, so a
segment that was torn by a kill or a full disk is recognised and skipped.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.frames import object_array
from kvprobe.capture.typed_json import from_json, parse_json
from kvprobe.model import Rows
from kvprobe.schema import TABLES, UNKNOWN, Table, numpy_dtype
from kvprobe.sources import TableRows

RawColumns: TypeAlias = dict[str, NDArray[Any]]
"""Columns as stored: schema dtypes, C strings and text as object arrays of bytes or str."""

SUFFIX = ".seg"
MAX_HEADER_BYTES = 1 << 20
_MAGIC = b"kvseg1"
_FIXED = re.compile(r"[ui][1248]|f8")
_TEXT = re.compile(r"S[1-9]\d{0,4}")


class TornSegment(Exception):
    """This segment is not whole; the others are still good."""


@dataclass(frozen=True)
class Block:
    """One table's part of a segment: where it is and how to check it."""

    table: str
    rows: int
    columns: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    """Bytes of the parts: packed array, then each text column; or the JSON alone."""
    crc32: int


@dataclass(frozen=True)
class Header:
    """The first line of a segment."""

    number: int
    start_ns: int
    end_ns: int
    blocks: tuple[Block, ...] = ()


# ---------------------------------------------------------------- writing


def write_segment(
    folder: Path, number: int, span_ns: tuple[int, int], tables: dict[str, list[TableRows]]
) -> None:
    """Write one segment under a temporary name and rename it.

    The kernel is asked to start writing it out, not waited for and not made to commit a journal:
    a recorder must not flush the file system that it measures. After a power cut the checksums
    tell which segments are whole.

    Raises:
        OSError: the disk is full or gone; nothing is left under the final name.
    """
    blocks: list[Block] = []
    parts: list[memoryview] = []
    for name, batches in tables.items():
        block, views = _encode(TABLES[name], batches)
        blocks.append(block)
        parts += views
    header = json.dumps(asdict(Header(number, *span_ns, tuple(blocks)))).encode()
    line = b"%s %08x %s\n" % (_MAGIC, zlib.crc32(header), header)
    final = folder / f"{number:08d}{SUFFIX}"
    temporary = final.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            for part in (memoryview(line), *parts):
                file.write(part)
            file.flush()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        temporary.rename(final)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _encode(table: Table, batches: Sequence[TableRows]) -> tuple[Block, list[memoryview]]:
    arrays = [batch for batch in batches if isinstance(batch, np.ndarray)]
    if arrays:
        return _encode_arrays(table, arrays)
    rows = [row for batch in batches if not isinstance(batch, (np.ndarray, dict)) for row in batch]
    columns = tuple((c.name, c.dtype) for c in table.columns)
    names = [c.name for c in table.columns]
    text = json.dumps([[row.get(name) for name in names] for row in rows], default=_plain).encode()
    return Block(table.name, len(rows), columns, (len(text),), zlib.crc32(text)), [memoryview(text)]


def _encode_arrays(table: Table, arrays: list[Rows]) -> tuple[Block, list[memoryview]]:
    dtype = numpy_dtype(table)
    texts = [c.name for c in table.columns if c.dtype[0] == "S"]
    parts: list[memoryview] = []
    if texts:
        fixed = [c.name for c in table.columns if c.name not in texts]
        packed = np.dtype([(name, dtype[name]) for name in fixed])
        sizes = [packed.itemsize * sum(map(len, arrays))]
        parts += [_bytes_of(array[fixed].astype(packed)) for array in arrays]
        for name in texts:
            joined = b"".join(map(_join_text, (array[name] for array in arrays)))
            sizes.append(len(joined))
            parts.append(memoryview(joined))
    else:
        parts += [_bytes_of(array) for array in arrays]
        sizes = [sum(map(len, parts))]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    columns = tuple((c.name, c.dtype) for c in table.columns)
    return Block(table.name, sum(map(len, arrays)), columns, tuple(sizes), crc), parts


def _bytes_of(array: Rows) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _join_text(column: NDArray[np.bytes_]) -> bytes:
    """Each value and a NUL. A value ends at its first NUL: what is behind it is not ours."""
    values = column.tolist()
    joined = b"\0".join(values) + b"\0" if values else b""
    if joined.count(b"\0") != len(values):
        joined = b"".join(value.split(b"\0", 1)[0] + b"\0" for value in values)
    return joined


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


# ---------------------------------------------------------------- reading


def check_segment(path: Path) -> Header:
    """The header of a segment of which every byte was checked.

    Raises:
        TornSegment: not a whole segment.
    """
    header, offset = _read_header(path)
    for block in header.blocks:
        _read_block(path, offset, block)
        offset += sum(block.sizes)
    return header


def read_segment(path: Path, table: Table) -> Iterator[RawColumns]:
    """The rows of one table in one segment, columns as the segment has them.

    Raises:
        TornSegment: not a whole segment, or these rows are not what was written.
    """
    header, offset = _read_header(path)
    for block in header.blocks:
        if block.table == table.name:
            data = _read_block(path, offset, block)
            try:
                yield _decode(block, memoryview(data))
            except (ValueError, TypeError, IndexError, OverflowError) as error:
                raise TornSegment(f"{block.table}: {error}") from error
        offset += sum(block.sizes)


def _read_header(path: Path) -> tuple[Header, int]:
    """The header and where the parts begin."""
    try:
        with open(path, "rb") as file:
            line = file.readline(MAX_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise TornSegment(str(error)) from error
    magic, _, rest = line.partition(b" ")
    checksum, _, text = rest.partition(b" ")
    if magic != _MAGIC or not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        raise TornSegment("header")
    try:
        header = from_json(Header, parse_json(text))
    except ValueError as error:
        raise TornSegment(str(error)) from error
    sizes = [size for block in header.blocks for size in block.sizes]
    if min(sizes, default=0) < 0 or len(line) + sum(sizes) != size:
        raise TornSegment("length")
    return header, len(line)


def _read_block(path: Path, offset: int, block: Block) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(sum(block.sizes))
    except OSError as error:
        raise TornSegment(str(error)) from error
    if len(data) != sum(block.sizes) or zlib.crc32(data) != block.crc32:
        raise TornSegment(block.table)
    return data


def _decode(block: Block, data: memoryview) -> RawColumns:
    if any(dtype == "O" for _, dtype in block.columns):
        return _decode_json(block, data)
    fixed = [(name, dtype) for name, dtype in block.columns if _FIXED.fullmatch(dtype)]
    texts = [name for name, dtype in block.columns if _TEXT.fullmatch(dtype)]
    if len(fixed) + len(texts) != len(block.columns) or len(block.sizes) != 1 + len(texts):
        raise ValueError("columns")
    records = np.frombuffer(data[: block.sizes[0]], dtype=np.dtype(fixed))
    columns: RawColumns = {name: records[name] for name, _ in fixed}
    start = block.sizes[0]
    for name, size in zip(texts, block.sizes[1:], strict=True):
        values = bytes(data[start : start + size]).split(b"\0")
        columns[name] = object_array(values[:-1])
        start += size
    if any(len(column) != block.rows for column in columns.values()):
        raise ValueError("row count")
    return columns


def _decode_json(block: Block, data: memoryview) -> RawColumns:
    rows = parse_json(bytes(data), max_bytes=len(data))
    if not isinstance(rows, list) or len(rows) != block.rows:
        raise ValueError("row count")
    columns: RawColumns = {}
    for index, (name, dtype) in enumerate(block.columns):
        values = [row[index] for row in rows]
        columns[name] = _typed(values, dtype)
    return columns


def _typed(values: list[Any], dtype: str) -> NDArray[Any]:
    """A JSON column in its schema type; what does not fit is unknown."""
    if dtype == "O":
        return object_array([None if v is None else str(v) for v in values])
    if dtype == "f8":
        return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)
    ints = [UNKNOWN if v is None or not abs(int(v)) < 2**63 else int(v) for v in values]
    return np.array(ints, dtype=np.int64)
