"""Open a capture, finished or not, made here or by a stranger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvprobe.capture.archive import Archive
from kvprobe.capture.lookups import fill_keys
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.part import PART_SUFFIX, PartFolder, part_of
from kvprobe.errors import KvprobeError
from kvprobe.model import Frame
from kvprobe.schema import TABLES


class Capture:
    """A recorded window; satisfies ``kvprobe.capture.Tables``. Made by ``open_capture``.

    Frames are read when first asked for and kept. Usable in a ``with`` statement.
    """

    def __init__(self, path: Path, storage: Archive | PartFolder) -> None:
        self.path = path
        self._storage = storage
        self._frames: dict[str, Frame] = {}

    @property
    def manifest(self) -> Manifest:
        """The facts; ``notes`` also has what reading the tables brought to light so far."""
        manifest = self._storage.manifest
        return replace(manifest, notes=(*manifest.notes, *self._storage.notes))

    @property
    def complete(self) -> bool:
        """Whether the recording ended in order."""
        return self._storage.manifest.complete

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing or was cut short."""
        return self.manifest.notes

    def frame(self, name: str) -> Frame:
        """The rows of one table; no rows where it was not recorded.

        Raises:
            KeyError: no such table in ``schema.TABLES``.
            KvprobeError: this table is damaged in the file (exit 4).
        """
        if name not in self._frames:
            frame = self._storage.frame(TABLES[name])
            manifest = self._storage.manifest
            if name == "lookups" and not manifest.redacted:
                fill_keys(frame, manifest.engine_name)
            self._frames[name] = frame
        return self._frames[name]

    def close(self) -> None:
        """Close the file; frames already read stay usable."""
        self._storage.close()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_capture(path: str | Path) -> Capture:
    """Open a finished capture, or what a recording that was cut off left behind.

    ``path`` is the name given to ``kvprobe capture -o``, or its ``.part`` folder. Safe for a
    stranger's file: sizes are bounded, nothing is unpacked to disk, nothing is executed.

    Raises:
        KvprobeError: not a capture or made by a newer kvprobe (exit 2), damaged (exit 4).
    """
    path = Path(path)
    beside = part_of(path)
    if path.is_dir():
        return Capture(path, PartFolder(path))
    if not path.exists() and beside.is_dir():
        return Capture(path, PartFolder(beside))
    if not path.exists():
        raise KvprobeError(f"no capture at {path}", "make one with: kvprobe capture -d 30 -o FILE")
    if not path.is_file():
        raise KvprobeError(f"{path} is not a file", "name a file made by kvprobe capture")
    archive = Archive(path)
    if beside.is_dir():
        archive.notes.append(
            f"a newer recording that was not finished lies beside this one: {path}{PART_SUFFIX}"
        )
    return Capture(path, archive)
