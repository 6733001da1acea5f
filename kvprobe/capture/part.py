"""The folder ``NAME.kvcap.part``: a recording that runs, or one that was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvprobe.capture.archive import MANIFEST, parse_manifest
from kvprobe.capture.frames import concat_frames, frame_column, unknown_column
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.segments import (
    SUFFIX,
    Header,
    RawColumns,
    TornSegment,
    check_segment,
    read_segment,
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
    """The segments of an unfinished recording; every byte is checked when it is opened.

    ``notes`` says how many segments were damaged or are gone.

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
        damaged = 0
        for segment in found:
            try:
                self._segments.append((segment, check_segment(segment)))
            except TornSegment:
                damaged += 1
        last = int(found[-1].stem) if found and found[-1].stem.isdecimal() else -1
        self.notes = _notes(damaged, last + 1 - len(found))
        self.manifest = self._up_to_date(manifest)

    def frames(self, table: Table) -> Iterator[Frame]:
        """The rows of one table, segment by segment.

        Raises:
            KvprobeError: the segments are of other columns (exit 4).
        """
        for segment, header in self._segments:
            if not any(block.table == table.name for block in header.blocks):
                continue
            try:
                for raw in read_segment(segment, table):
                    yield _frame(table, raw)
            except TornSegment as error:
                raise KvprobeError(
                    f"{segment} is damaged: {error}",
                    f"move this segment away and read {self.path} without it",
                    ExitCode.INCOMPLETE,
                ) from error

    def frame(self, table: Table) -> Frame:
        """The rows of one table."""
        return concat_frames(table, self.frames(table))

    def close(self) -> None:
        """Nothing is held open."""

    def _up_to_date(self, manifest: Manifest) -> Manifest:
        """The rows that are there, and the segment that came after the last manifest."""
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


def _notes(damaged: int, gone: int) -> list[str]:
    return [
        f"{count} segments (about a second each) {what}"
        for count, what in ((damaged, "are damaged and were skipped"), (gone, "are gone"))
        if count > 0
    ]


def _frame(table: Table, raw: RawColumns) -> Frame:
    """A frame from a segment's columns, whichever kvprobe wrote them.

    Raises:
        TornSegment: a column that must be known is absent or of another type.
    """
    length = len(next(iter(raw.values())))
    frame: Frame = {}
    for column in table.all_columns:
        values = raw.get(column.name)
        if values is None:
            if column in table.columns and column.null is None:
                raise TornSegment(f"column {column.name} is missing")
            frame[column.name] = unknown_column(column, length)
        elif values.dtype == np.dtype("O" if column.dtype[0] == "S" else column.dtype):
            frame[column.name] = frame_column(column, values)
        else:
            raise TornSegment(f"column {column.name} has type {values.dtype}")
    return frame
