"""Keep what a source delivers: segments while it runs, one file when it is over."""

from __future__ import annotations

import fcntl
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvprobe.capture.archive import MANIFEST, write_archive
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.part import PartFolder, part_of
from kvprobe.capture.redact import Redactor
from kvprobe.capture.segments import write_segment
from kvprobe.capture.typed_json import to_json
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.schema import TABLES
from kvprobe.sources import Batch, TableRows

_LOCK = "lock"
_ARCHIVE = "archive.tmp"
_OURS = re.compile(r"\d{8}\.(seg|tmp)|manifest\.(json|tmp)|archive\.tmp|lock")
_QUEUED_SEGMENTS = 16
"""When the disk is this many segments behind, polling waits for it and the kernel counts losses."""


@dataclass(frozen=True)
class _Work:
    number: int
    span_ns: tuple[int, int]
    tables: dict[str, list[TableRows]]
    manifest: Manifest


class Recorder:
    """Writes ``out`` by way of the folder ``out.part``.

    ``add`` collects, ``roll`` (about once a second) hands what was collected to a thread that
    writes a segment and the manifest, ``finish`` packs all into ``out`` and removes the folder.
    A full disk stops the writing, not the caller: look at ``failure`` after a ``roll``.

    Raises:
        KvprobeError: the output exists and ``force`` is not set, or cannot be made (exit 2).
    """

    def __init__(self, out: Path, force: bool = False) -> None:
        self.out = out
        self.part = part_of(out)
        self.failure: OSError | None = None
        self._lock: int | None = _make_folder(out, self.part, force)
        self._pending: dict[str, list[TableRows]] = {}
        self._number = 0
        self._work: queue.Queue[_Work | None] = queue.Queue(_QUEUED_SEGMENTS)
        self._writer = threading.Thread(target=self._write, name="kvprobe-writer", daemon=True)
        self._writer.start()

    def add(self, batch: Batch) -> None:
        """Keep the rows of a batch; they reach the disk with the next ``roll``."""
        for name, rows in batch.tables.items():
            if len(rows):
                self._pending.setdefault(name, []).append(rows)

    def roll(self, manifest: Manifest, start_ns: int) -> None:
        """End a segment: the rows added since the last one, of ``start_ns`` to ``end_ns``."""
        if self.failure is not None:
            return
        tables, self._pending = self._pending, {}
        self._work.put(_Work(self._number, (start_ns, manifest.end_ns), tables, manifest))
        self._number += bool(tables)

    def stop(self) -> None:
        """Wait until everything handed over is written or has failed. May be called again."""
        if self._writer.is_alive():
            self._work.put(None)
            self._writer.join()

    def finish(
        self,
        manifest: Manifest,
        progress: Callable[[int, int], None] | None = None,
        redactor: Redactor | None = None,
    ) -> Manifest:
        """Pack the segments into ``out``, remove the folder, return the facts in the file.

        Args:
            manifest: the final facts; ``complete`` is for the caller to say.
            progress: told the rows packed and the rows in all.
            redactor: hides names on the way; None keeps them.

        Raises:
            KvprobeError: the disk is full; the folder stays and can be read (exit 4).
        """
        self.stop()
        if self.failure is not None:
            why = f"the recording was cut short: {self.failure.strerror}"
            manifest = replace(manifest, complete=False, notes=(*manifest.notes, why))
        try:
            return pack(self.part, self.out, manifest, progress, redactor)
        finally:
            self.leave()

    def leave(self) -> None:
        """Stop and let go of the folder; whatever is in it stays. May be called again."""
        self.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Stop, and remove the folder: nothing was recorded."""
        self.leave()
        _remove_folder(self.part)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            if self.failure is not None:
                continue  # keep taking, so that the producer never blocks on a dead disk
            try:
                if work.tables:
                    write_segment(self.part, work.number, work.span_ns, work.tables)
                _replace_manifest(self.part, work.manifest)
            except OSError as error:
                self.failure = error


def pack(
    part: Path,
    out: Path,
    manifest: Manifest | None = None,
    progress: Callable[[int, int], None] | None = None,
    redactor: Redactor | None = None,
) -> Manifest:
    """Make the finished file from a ``.part`` folder and remove the folder; returns the manifest.

    Without ``manifest`` this finishes a recording that was cut off: the file says ``incomplete``.
    Names are hidden by ``redactor``, or by one of its own where the manifest asks for it.

    Raises:
        KvprobeError: the folder is no recording (exit 2), or there is no room (exit 4); the
            folder is then as it was.
    """
    folder = PartFolder(part)
    rows = {name: loss.rows for name, loss in folder.manifest.losses.items()}
    chosen = folder.manifest if manifest is None else manifest
    chosen = replace(
        chosen,
        losses={n: replace(loss, rows=rows.get(n, 0)) for n, loss in chosen.losses.items()},
        notes=(*chosen.notes, *folder.notes),
    )
    tables = {name: folder.frames(table) for name, table in TABLES.items() if rows.get(name)}
    if redactor is None and chosen.redact_when_packed:
        redactor = Redactor()
    if redactor is not None:
        tables = {n: redactor.frames(n, f, chosen) for n, f in tables.items()}
        chosen = redactor.manifest(chosen)
    total = sum(rows.values())
    if progress is not None:
        progress(0, total)
    temporary = part / _ARCHIVE
    temporary.unlink(missing_ok=True)
    try:
        write_archive(
            temporary,
            chosen,
            tables,
            derived=chosen.redacted,
            progress=None if progress is None else lambda done: progress(done, total),
        )
        os.replace(temporary, out)
        _sync_folder(out.parent)
    except OSError as error:
        raise KvprobeError(
            f"cannot write {out}: {error.strerror}",
            f"make room; everything recorded is in {part}",
            ExitCode.INCOMPLETE,
        ) from error
    _remove_folder(part)
    return chosen


def pack_abandoned(
    part: Path,
    out: Path,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    redactor: Redactor | None = None,
) -> Manifest:
    """``pack`` for a folder that no recorder holds any more; ``out`` must not exist or ``force``.

    Raises:
        KvprobeError: there is nothing to pack, somebody still records to it, or see ``pack``.
    """
    if not part.is_dir() or not (part / MANIFEST).exists():
        raise KvprobeError(f"no unfinished recording at {part}", "name the -o FILE that it had")
    if out.exists() and not force:
        raise KvprobeError(f"{out} exists", "move it away or add --force")
    lock = _lock(part)
    try:
        return pack(part, out, None, progress, redactor)
    finally:
        os.close(lock)


def _replace_manifest(part: Path, manifest: Manifest) -> None:
    temporary = part / "manifest.tmp"
    temporary.write_bytes(to_json(manifest))
    temporary.replace(part / MANIFEST)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(out: Path, part: Path, force: bool) -> int:
    """Make ``part`` and lock it; returns the lock's descriptor."""
    if not out.parent.is_dir():
        raise KvprobeError(
            f"no folder {out.parent} for the capture file", "make it, or name another"
        )
    if out.is_dir():
        raise KvprobeError(f"{out} is a folder", "name a file, such as node1.kvcap")
    if out.exists() and not force:
        raise KvprobeError(f"{out} exists", "choose another name or add --force")
    if part.exists():
        if not force:
            raise KvprobeError(
                f"{part} holds a recording that was not finished",
                f"kvprobe report {out} reads it, kvprobe capture --finish -o {out} packs it, "
                "--force replaces it",
            )
        _check_ours(part)
        os.close(_lock(part))
        _remove_folder(part)
    try:
        part.mkdir(0o700)  # whatever is to be redacted is still legible in it
        return _lock(part)
    except OSError as error:
        raise KvprobeError(
            f"cannot make {part}: {error.strerror}", "choose another place"
        ) from error


def _lock(part: Path) -> int:
    descriptor = os.open(part / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise KvprobeError(
            f"another kvprobe is recording to {part}", "choose another name"
        ) from error
    return descriptor


def _remove_folder(part: Path) -> None:
    """Remove a recorder's folder, and nothing that a recorder did not make.

    Raises:
        KvprobeError: there are other files in it; all are left.
    """
    for name in _check_ours(part):
        (part / name).unlink()
    part.rmdir()


def _check_ours(part: Path) -> list[str]:
    names = os.listdir(part)
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign:
        raise KvprobeError(
            f"{part} has files that kvprobe did not make, such as {foreign[0]}", "move them away"
        )
    return names
