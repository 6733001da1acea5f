"""The folder ``NAME.kvcap.part``: a recording that runs, or one that was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvprobe.capture.archive import MANIFEST, parse_manifest
from kvprobe.capture.frames import concat_frames, frame_column, unknown_column
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.segments import (
    SUFFIX,
    Header,
    RawColumns,
    TornSegment,
    read_blocks,
    read_header,
)
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Frame, Loss
from kvprobe.schema import TABLES, Table

PART_SUFFIX = ".part"
MAX_SEGMENTS = 1_000_000


def part_of(path: Path) -> Path:
    """The folder that a recording of ``path`` uses."""
    return path.with_name(path.name + PART_SUFFIX)


class PartFolder:
    """The segments of an unfinished recording, open for reading.

    ``manifest`` is the last one written, brought up to date from the segments; ``notes`` says
    how many segments were torn or are gone.

    Raises:
        KvprobeError: not such a folder (exit 2), of a newer format (2), or damaged (4).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            manifest = parse_manifest((path / MANIFEST).read_bytes(), path)
            found = sorted(path.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise KvprobeError(
                f"{path} is not a kvprobe capture", "name a file made by kvprobe capture"
            ) from error
        if len(found) > MAX_SEGMENTS:
            raise KvprobeError(f"{path} has {len(found)} segments", exit_code=ExitCode.INCOMPLETE)
        self._segments: list[tuple[Path, Header]] = []
        self.torn: set[str] = set()
        for segment in found:
            try:
                self._segments.append((segment, read_header(segment)[0]))
            except TornSegment:
                self.torn.add(segment.name)
        self.manifest = self._up_to_date(manifest)

    @property
    def notes(self) -> list[str]:
        """What is known to be missing."""
        numbers = [header.number for _, header in self._segments]
        gone = max(numbers, default=-1) + 1 - len(set(numbers)) - self._torn_before(numbers)
        notes = []
        if self.torn:
            notes.append(f"{len(self.torn)} damaged segments were skipped")
        if gone > 0:
            notes.append(f"{gone} segments are gone")
        return notes

    def raw(self, table: Table) -> Iterator[RawColumns]:
        """The rows of one table, segment by segment; a torn segment is skipped and counted."""
        for segment, header in self._segments:
            if segment.name in self.torn or not any(b.table == table.name for b in header.blocks):
                continue
            try:
                for columns in read_blocks(segment, table):
                    _require(table, columns)
                    yield columns
            except TornSegment:
                self.torn.add(segment.name)

    def frame(self, table: Table) -> Frame:
        """The rows of one table."""
        return concat_frames(table, (_frame(table, raw) for raw in self.raw(table)))

    def close(self) -> None:
        """Nothing is held open."""

    def _torn_before(self, numbers: list[int]) -> int:
        last = max(numbers, default=-1)
        return sum(1 for name in self.torn if name < f"{last + 1:08d}")

    def _up_to_date(self, manifest: Manifest) -> Manifest:
        """The segment after the last manifest counts too."""
        rows = dict.fromkeys(manifest.losses, 0)
        for _, header in self._segments:
            for block in header.blocks:
                if block.table in TABLES:
                    rows[block.table] = rows.get(block.table, 0) + block.rows
        losses = {
            name: replace(manifest.losses.get(name, Loss()), rows=count)
            for name, count in rows.items()
        }
        end_ns = max([manifest.end_ns, *(header.end_ns for _, header in self._segments)])
        return replace(manifest, complete=False, losses=losses, end_ns=end_ns)


def _require(table: Table, raw: RawColumns) -> None:
    """Refuse rows whose types are not the schema's.

    Raises:
        TornSegment: they are not.
    """
    for column in table.columns:
        values = raw.get(column.name)
        if values is None:
            if column.null is None and table.kernel:
                raise TornSegment(f"column {column.name} is missing")
        elif (values.dtype == object) != (column.dtype[0] in "SO") or (
            values.dtype != object and values.dtype.str.lstrip("<|") != column.dtype
        ):
            raise TornSegment(f"column {column.name} has type {values.dtype}")


def _frame(table: Table, raw: RawColumns) -> Frame:
    length = len(next(iter(raw.values())))
    return {
        c.name: frame_column(c, raw[c.name]) if c.name in raw else unknown_column(c, length)
        for c in table.all_columns
    }
