"""Files of JSON lines that an engine writes into a folder, under new names."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprobe.adapter import JsonFiles, News
from kvprobe.clock import WallClock
from kvprobe.errors import KvprobeError
from kvprobe.signals import FeedBatch
from kvprobe.signals.lines import READ_BYTES_A_POLL, LineFollower
from kvprobe.signals.messages import NOT_UNDERSTOOD

LOOK_NS = 500_000_000
"""Between two looks into the folder."""
MOST_OLD_BYTES = 64 << 20
"""How much is read of what is in the folder to begin with: the newest."""
NEWEST = 16
"""So many files are looked at in every poll; others when the folder changes."""
WHOLE_LOOK_NS = 10_000_000_000
"""Between two looks at every file of a folder that does not change."""
_FILES_A_POLL = 200
_RESOLUTION_NS = 1_000_000_000
"""A folder may change within this without another time stamp."""
_MOST_LOOKING = 20
"""A look is followed by so many times its length without one."""


@dataclass
class _File:
    """One file of the folder. ``read_bytes`` of it are read, or are not to be read.

    ``size_bytes`` is up to where it was seen, ``grew`` that there is more by now.
    """

    path: str
    readers: Sequence[JsonFiles]
    inode: int = 0
    changed_ns: int = 0
    size_bytes: int = 0
    read_bytes: int = 0
    grew: bool = False
    follower: LineFollower | None = None

    def see(self, there: os.stat_result) -> None:
        """Take in its size and time."""
        self.changed_ns = there.st_mtime_ns
        if self.follower is not None:
            return
        if there.st_ino != self.inode:
            self.inode, self.read_bytes, self.size_bytes = there.st_ino, 0, 0
        self.grew = self.grew or there.st_size != self.size_bytes
        self.size_bytes = there.st_size

    @property
    def whole(self) -> bool:
        """Whether all of it is read, a last line without an end included."""
        return not self.grew and self.follower is None and self.read_bytes == self.size_bytes

    def open(self) -> LineFollower:
        """The follower, which goes on where the last one was left."""
        if self.follower is None:
            self.follower = LineFollower(self.path, start=self.read_bytes)
        self.grew = False
        return self.follower

    def leave(self) -> None:
        """Do without a descriptor until it grows."""
        if self.follower is not None:
            self.size_bytes = self.follower.position
            self.read_bytes = self.follower.leave()
            self.follower = None


class FilesFeed:
    """Satisfies ``signals.Feed``: the files of a folder that an adapter declares.

    ``understood`` counts lines, ``ignored`` those that no adapter understands, ``lost`` those that
    are too long to be kept.

    Args:
        folder: where they are; it may come later.
        json_files: what to look for.
        now: CLOCK_MONOTONIC in nanoseconds.

    Raises:
        KvprobeError: ``folder`` is no folder, cannot be read, or cannot come.
    """

    last_word = True

    def __init__(
        self,
        folder: str,
        json_files: Sequence[JsonFiles],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        _check(Path(folder))
        self.name = f"files:{folder}"
        self._folder = folder
        self._json_files = json_files
        self._now = now
        self._files: dict[str, _File] = {}
        self._folder_ns: int | None = None
        self._look_due_ns = self._whole_look_due_ns = 0
        self._began = False
        self._not_read = 0
        self._news: list[News] = []
        self._understood = self._ignored = self._lost = 0

    def poll(self, clock: WallClock) -> FeedBatch:
        """Return what is new; reads some megabytes of some files at most."""
        if self._now() >= self._look_due_ns:
            self._look(clock)
        newest = self._newest()
        left = READ_BYTES_A_POLL
        waiting = [file for file in self._files.values() if file.grew or file.follower is not None]
        waiting.sort(key=lambda file: file.changed_ns)
        for file in waiting[:_FILES_A_POLL]:
            follower = file.open()
            before = follower.position
            self._take(file, follower.lines(left), clock)
            used = max(follower.position - before, 0)
            if used < left and file.path not in newest:
                file.leave()
            left -= used
            if left <= 0:
                break
        return self._batch()

    def close(self, clock: WallClock) -> FeedBatch:
        """Return the rest, last lines without an end included."""
        self._whole_look(clock)
        for file in sorted(self._files.values(), key=lambda file: file.changed_ns):
            if not file.whole:
                self._finish(file, clock)
        note = f"{self._not_read} old files were not read, or only their ends"
        return self._batch([note] if self._not_read else [])

    def _batch(self, notes: Sequence[str] = ()) -> FeedBatch:
        batch = FeedBatch(
            self._news,
            understood=self._understood,
            ignored=self._ignored,
            lost=self._lost,
            notes=notes,
        )
        self._news, self._understood, self._ignored, self._lost = [], 0, 0, 0
        return batch

    def _newest(self) -> set[str]:
        """Paths of the files that are followed without a break."""
        by_time = heapq.nlargest(NEWEST, self._files.values(), key=lambda file: file.changed_ns)
        return {file.path for file in by_time}

    def _look(self, clock: WallClock) -> None:
        """Look into the folder if it has changed, or after a while all the same."""
        began_ns = self._now()
        try:
            folder_ns = os.stat(self._folder).st_mtime_ns
        except OSError:
            folder_ns = None
        if folder_ns != self._folder_ns or began_ns >= self._whole_look_due_ns:
            settled = folder_ns is not None and time.time_ns() - folder_ns > _RESOLUTION_NS
            self._folder_ns = folder_ns if settled else None
            self._whole_look_due_ns = began_ns + WHOLE_LOOK_NS
            self._whole_look(clock)
        took_ns = self._now() - began_ns
        self._look_due_ns = began_ns + max(LOOK_NS, _MOST_LOOKING * took_ns)

    def _whole_look(self, clock: WallClock) -> None:
        """Take in which files there are, and which have grown."""
        there = self._there()
        if there is None:
            return
        for name in self._files.keys() - there.keys():
            self._finish(self._files.pop(name), clock)
        for name, (readers, state) in there.items():
            if name not in self._files:
                self._files[name] = _File(os.path.join(self._folder, name), readers)
            self._files[name].see(state)
        if not self._began:
            self._began = True
            self._leave_old()

    def _there(self) -> dict[str, tuple[Sequence[JsonFiles], os.stat_result]] | None:
        """The files that an adapter knows; None where the folder cannot be read."""
        found: dict[str, tuple[Sequence[JsonFiles], os.stat_result]] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    readers = [f for f in self._json_files if f.names.fullmatch(entry.name)]
                    if readers and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):
                            found[entry.name] = readers, entry.stat()
        except OSError:
            return None
        return found

    def _leave_old(self) -> None:
        """Of what is there to begin with, read the newest only."""
        left = MOST_OLD_BYTES
        for file in sorted(self._files.values(), key=lambda file: -file.changed_ns):
            if file.size_bytes > left:
                file.read_bytes = file.size_bytes - left
                file.grew = left > 0
                self._not_read += 1
            left = max(left - file.size_bytes, 0)

    def _finish(self, file: _File, clock: WallClock) -> None:
        """Read the rest of a file, a last line without an end included."""
        follower = file.open()
        self._take(file, follower.close(), clock)
        file.follower = None

    def _take(self, file: _File, lines: Sequence[bytes], clock: WallClock) -> None:
        for line in lines:
            if not line.strip():
                continue
            if self._read(line, file.readers, clock):
                self._understood += 1
            else:
                self._ignored += 1
        if file.follower is not None:
            self._lost += file.follower.take_skipped()

    def _read(self, line: bytes, readers: Sequence[JsonFiles], clock: WallClock) -> bool:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(said, dict):
            return False
        for reader in readers:
            try:
                self._news += list(reader.read(said, clock.moment))
            except NOT_UNDERSTOOD:
                continue
            return True
        return False


def _check(folder: Path) -> None:
    try:
        there = folder.stat()
    except FileNotFoundError:
        if folder.resolve().parent.is_dir():
            return
        raise KvprobeError(f"no folder {folder}", "name the folder that the engine uses") from None
    except OSError as error:
        raise KvprobeError(f"cannot read {folder}: {error.strerror}", "run as root") from None
    if not stat.S_ISDIR(there.st_mode):
        raise KvprobeError(f"{folder} is not a folder", f"for a log: log:{folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise KvprobeError(f"no right to read {folder}", "run as root")
