"""``Tables``: what the correlator reads, be it a capture file, a live window or a test's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvprobe.capture.frames import empty_frame
from kvprobe.capture.manifest import Manifest
from kvprobe.model import Frame
from kvprobe.schema import TABLES


class Tables(Protocol):
    """Rows of one window and the facts about them.

    ``frame(name)`` gives every column of that table (``schema.TABLES[name].all_columns``) as
    arrays of equal length: int64 with -1 for unknown, float64 with nan, object of str or None.
    A table that was not recorded is a frame of no rows. Frames are shared: do not write to them.

    A ``lookups`` frame also has ``kv_key`` (what the engine's recogniser makes of ``path``; None:
    not KV cache) and ``kv_temporary`` (1, 0, -1 where there is no key). Use these and not the
    path, which may be redacted; they join ``keys.key``.

    ``manifest`` has the window (``window_ns``, ``start_wall_ns``), ``engine``, ``devices``,
    ``losses``, ``cost``, ``filters``, ``missing``, ``complete`` and ``notes``.
    """

    @property
    def manifest(self) -> Manifest:
        """The facts about these rows."""
        ...

    def frame(self, name: str) -> Frame:
        """The rows of one table.

        Raises:
            KeyError: ``name`` is not in ``schema.TABLES``.
            KvprobeError: the table is damaged in the file.
        """
        ...


class FixedTables:
    """``Tables`` of frames already in memory."""

    def __init__(self, manifest: Manifest, frames: Mapping[str, Frame]) -> None:
        self.manifest = manifest
        self._frames = dict(frames)

    def frame(self, name: str) -> Frame:
        """The rows of one table; no rows where none were given."""
        table = TABLES[name]
        if name not in self._frames:
            self._frames[name] = empty_frame(table)
        return self._frames[name]
