"""Follow a text file that an engine is writing."""

from __future__ import annotations

import os

MAX_LINE_BYTES = 4 << 20
"""Longer lines are skipped and counted; the keys of a million-token prompt are below it."""
READ_BYTES_A_POLL = 8 << 20
_READ_BYTES = 1 << 20


class LineFollower:
    """Complete lines of a file that grows, is rotated (replaced) or truncated, or comes later.

    A torn last line is kept until its end arrives. ``skipped`` counts lines over the limit.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._part = bytearray()
        self._skipping = False
        self._offset = 0
        self.skipped = 0

    def lines(self, most_bytes: int | None = READ_BYTES_A_POLL) -> list[bytes]:
        """Lines that are complete by now, without their ends; reads at most ``most_bytes``."""
        found: list[bytes] = []
        while most_bytes is None or most_bytes > 0:
            if self._file is None and not self._open():
                break
            data = self._read()
            if data:
                self._split(data, found)
                if most_bytes is not None:
                    most_bytes -= len(data)
            elif not self._rotated():
                break
            else:
                self._finish_file(found)
        return found

    def close(self) -> list[bytes]:
        """The rest; a last line without an end counts as a line."""
        found = self.lines(None)
        self._finish_file(found)
        return found

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._offset = 0
        return True

    def _read(self) -> bytes:
        assert self._file is not None
        try:
            if os.fstat(self._file).st_size < self._offset:  # truncated: what we had is void
                self._offset = 0
                self._part.clear()
                self._skipping = False
            data = os.pread(self._file, _READ_BYTES, self._offset)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _rotated(self) -> bool:
        """Whether the path names another file by now."""
        assert self._file is not None
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        here = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _finish_file(self, found: list[bytes]) -> None:
        if self._part and not self._skipping:
            found.append(bytes(self._part))
        self._part.clear()
        self._skipping = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _split(self, data: bytes, found: list[bytes]) -> None:
        *ended, rest = data.split(b"\n")
        for line in ended:
            if self._skipping:
                self._skipping = False
            elif len(self._part) + len(line) > MAX_LINE_BYTES:
                self.skipped += 1
            else:
                found.append(bytes(self._part) + line if self._part else line)
            self._part.clear()
        if self._skipping:
            return
        self._part += rest
        if len(self._part) > MAX_LINE_BYTES:
            self._part.clear()
            self._skipping = True
            self.skipped += 1
