"""The last seconds of a source, as tables that the correlator reads like a capture."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvprobe.capture.frames import (
    concat_frames,
    frame_from_dicts,
    frame_from_rows,
    frame_length,
)
from kvprobe.capture.lookups import fill_keys
from kvprobe.capture.manifest import Manifest
from kvprobe.model import Frame
from kvprobe.schema import TABLES, Table
from kvprobe.sources import Batch, Source, TableRows

MAX_ROWS = 500_000
"""Rows of one table that a window holds; above it the window gets shorter, and says so."""
_KEPT_ROWS = 100_000
"""Rows of a table that is kept up to which those from before the window stay."""


class Window:
    """A rolling window; satisfies ``kvprobe.capture.Tables``.

    ``add`` every batch of a source. A row is dropped ``seconds`` after it arrived. ``lookups``
    and ``keys`` are kept longer while there is little of them: they name the files that are still
    open and the chunks of requests that are still running. So are ``knobs``, which come once.

    ``manifest.window_ns`` is the span for which every row is here: shorter than ``seconds`` where
    one table would hold more than ``MAX_ROWS``.
    """

    def __init__(self, manifest: Manifest, seconds: float) -> None:
        self.seconds = seconds
        self._manifest = replace(manifest, end_ns=manifest.start_ns)
        self._parts: dict[str, deque[tuple[int, Frame]]] = {name: deque() for name in TABLES}
        self._rows = dict.fromkeys(TABLES, 0)
        self._cache: dict[str, Frame] = {}

    @property
    def manifest(self) -> Manifest:
        """The facts, with the window that the tables cover now."""
        return self._manifest

    def add(self, batch: Batch, source: Source | None = None) -> None:
        """Take a batch in; with ``source``, also its engine, devices, losses and cost of now."""
        for name, rows in batch.tables.items():
            if not len(rows):
                continue
            frame = as_frame(TABLES[name], rows)
            if name == "lookups" and not isinstance(rows, dict):
                fill_keys(frame, self._manifest.engine_name)
            self._parts[name].append((batch.now_ns, frame))
            self._rows[name] += frame_length(frame)
            self._cache.pop(name, None)
        start_ns = max(self._manifest.start_ns, batch.now_ns - int(self.seconds * 1e9))
        self._manifest = replace(self._manifest, start_ns=self._trim(start_ns), end_ns=batch.now_ns)
        if source is not None:
            self._refresh(source)

    def frame(self, name: str) -> Frame:
        """The rows of one table in the window.

        Raises:
            KeyError: no such table in ``schema.TABLES``.
        """
        if name not in self._cache:
            parts = self._parts[name]
            frame = concat_frames(TABLES[name], (part for _, part in parts))
            if len(parts) > 1:
                # Joined once, not again at every refresh.
                self._parts[name] = _by_second(TABLES[name], parts)
            self._cache[name] = frame
        return self._cache[name]

    def _trim(self, start_ns: int) -> int:
        """Drop what is too old or too much; returns from when on every row is here."""
        for name, parts in self._parts.items():
            kept = name in ("lookups", "keys", "knobs")
            while parts:
                arrived_ns, frame = parts[0]
                bound = _KEPT_ROWS if arrived_ns < start_ns else MAX_ROWS
                too_many = self._rows[name] > bound and len(parts) > 1
                if not too_many and (kept or arrived_ns >= start_ns):
                    break
                parts.popleft()
                self._rows[name] -= frame_length(frame)
                self._cache.pop(name, None)
                if too_many:
                    start_ns = max(start_ns, arrived_ns)
        return start_ns

    def _refresh(self, source: Source) -> None:
        self._manifest = replace(
            self._manifest,
            engine=source.engine,
            devices=source.devices,
            nvme_paths=source.nvme_paths,
            gpu=source.gpu,
            losses=dict(source.losses()),
            cost=replace(
                self._manifest.cost, programs=source.cost(), measured_ns=source.measured_ns
            ),
        )


def as_frame(table: Table, rows: TableRows) -> Frame:
    """Rows of any form as a frame."""
    if isinstance(rows, np.ndarray):
        return frame_from_rows(table, rows)
    if isinstance(rows, dict):
        return rows
    return frame_from_dicts(table, rows)


def _by_second(table: Table, parts: Iterable[tuple[int, Frame]]) -> deque[tuple[int, Frame]]:
    """The same rows in about one part for each second of arrival."""
    groups: dict[int, list[tuple[int, Frame]]] = {}
    for arrived_ns, frame in parts:
        groups.setdefault(arrived_ns // 1_000_000_000, []).append((arrived_ns, frame))
    return deque(
        (group[-1][0], concat_frames(table, (frame for _, frame in group)))
        for group in groups.values()
    )
