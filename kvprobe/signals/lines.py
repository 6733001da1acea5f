"""Follow a text file that an engine is writing."""

from __future__ import annotations

import os
from collections.abc import Iterator

MAX_LINE_BYTES = 4 << 20
"""Longer lines are skipped and counted; the keys of a million-token prompt are below it."""
READ_BYTES_A_POLL = 8 << 20
_READ_BYTES = 1 << 20


class LineAssembler:
    r"""Puts pieces of a stream together to blocks of whole lines.

    Args:
        ends: the bytes that end a line; ``\r\n`` is one end where both are among them.
    """

    def __init__(self, ends: bytes = b"\n") -> None:
        self._ends = [ends[i : i + 1] for i in range(len(ends))]
        self._part = bytearray()
        self._skipping = False
        self._skipped = 0

    def add(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, with their ends; its rest is kept."""
        end = self.last_end(data)
        block, rest = data[:end], data[end:]
        if block:
            if self._skipping or len(self._part) + len(block) > MAX_LINE_BYTES:
                block = self._without_long_line(block)
            elif self._part:
                block = bytes(self._part) + block
            self._part.clear()
        if not self._skipping:
            self._part += rest
            if len(self._part) > MAX_LINE_BYTES:
                self._part.clear()
                self._skipping = True
                self._skipped += 1
        return block

    def last(self) -> bytes:
        """The last line, with an end that it did not have."""
        line = bytes(self._part)
        self.clear()
        return line + b"\n" if line else b""

    def clear(self, amidst: bool = False) -> None:
        """Forget what is kept. ``amidst``: a line goes on that is not to be seen."""
        self._part.clear()
        self._skipping = amidst

    def take_skipped(self) -> int:
        """How many lines over ``MAX_LINE_BYTES`` there were since this was asked last."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def last_end(self, data: bytes) -> int:
        r"""How many bytes of ``data`` are whole lines; a last ``\r`` may be half of an end."""
        last = max(data.rfind(end, 0, len(data) - (end == b"\r")) for end in self._ends)
        return last + 1

    def _without_long_line(self, block: bytes) -> bytes:
        """``block`` behind the part that is kept, without its first line where that is too long."""
        first = 1 + min(place for end in self._ends if (place := block.find(end)) >= 0)
        if not self._skipping and len(self._part) + first - 1 <= MAX_LINE_BYTES:
            return bytes(self._part) + block
        self._skipped += not self._skipping
        self._skipping = False
        return block[first:]


class LineFollower:
    r"""Complete lines of a file that grows, is rotated (replaced) or truncated, or comes later.

    A torn last line is kept until its end arrives. A file that was renamed is read on until there
    is something in the one that took its name: many engines are never told to open that. Of a
    truncation that is outgrown between two calls nothing can be seen. NUL bytes, which a file
    truncated under its writer is full of, are dropped.

    Args:
        path: the file.
        ends: the bytes that end a line, see ``LineAssembler``; for ``blocks`` and ``rest``.
        start: the first byte to be read; the rest of a line that began before it is dropped.
        most_behind_bytes: where more than that is unread, all but that is skipped (None: never).

    Attributes:
        skipped_bytes: how much was passed over by ``most_behind_bytes``.
    """

    def __init__(
        self,
        path: str,
        *,
        ends: bytes = b"\n",
        start: int = 0,
        most_behind_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._assembler = LineAssembler(ends)
        self._start = start
        self._most_behind_bytes = most_behind_bytes
        self._file: int | None = None
        self._offset = 0
        self._line_offset = 0
        self.skipped_bytes = 0

    @property
    def offset(self) -> int:
        """Where the first line begins that was not handed out."""
        return self._line_offset

    @property
    def position(self) -> int:
        """Up to where the file was read."""
        return self._offset

    def take_skipped(self) -> int:
        """How many lines over ``MAX_LINE_BYTES`` there were since this was asked last."""
        return self._assembler.take_skipped()

    def lines(self, most_bytes: int | None = READ_BYTES_A_POLL) -> list[bytes]:
        """Lines that are complete by now, without their ends; reads at most ``most_bytes``."""
        found: list[bytes] = []
        for block in self.blocks(most_bytes):
            found += block[:-1].split(b"\n")
        return found

    def close(self) -> list[bytes]:
        """The rest; a last line without an end counts as a line."""
        found: list[bytes] = []
        for block in self.rest():
            found += block[:-1].split(b"\n")
        return found

    def blocks(self, most_bytes: int | None = READ_BYTES_A_POLL) -> Iterator[bytes]:
        """The same as ``lines``, many at once: each block is whole lines with their ends."""
        left = most_bytes
        while left is None or left > 0:
            file = self._file if self._file is not None else self._open()
            if file is None:
                return
            replaced = self._replaced(file)  # asked first: what was written before is read below
            data = self._read(file)
            if data:
                left = left if left is None else left - len(data)
                block = self._whole_lines(file, data)
            elif replaced:
                block = self._finish_file()
            else:
                return
            if block:
                yield block

    def rest(self) -> Iterator[bytes]:
        """The same as ``close``, as blocks."""
        yield from self.blocks(None)
        if block := self._finish_file():
            yield block

    def leave(self) -> int:
        """Close the file, and tell where reading it may go on: the ``offset``."""
        offset = self._line_offset
        self._finish_file()
        return offset

    def _open(self) -> int | None:
        try:
            # A named pipe would block.
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        self._go_to(self._start)
        self._start = 0
        return self._file

    def _go_to(self, offset: int) -> None:
        """Go on at ``offset``, or at the next line where that is amidst one."""
        self._assembler.clear(amidst=offset > 0)
        self._offset = self._line_offset = max(offset - 1, 0)

    def _read(self, file: int) -> bytes:
        """What comes next; as long as there is something it is not empty."""
        try:
            size = os.fstat(file).st_size
            if size < self._offset:  # truncated: what we had is void
                self._go_to(0)
            most = self._most_behind_bytes
            if most is not None and size - self._offset > most:
                self._pass_over(file, size - most)
            data = os.pread(file, _READ_BYTES, self._offset)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _pass_over(self, file: int, offset: int) -> None:
        """Skip to ``offset``, or over a hole that nobody wrote."""
        data = _next_data(file, self._offset, offset)
        if data >= offset:
            self._assembler.clear()
            self._offset = self._line_offset = data
        else:
            self.skipped_bytes += offset - data
            self._go_to(offset)

    def _replaced(self, file: int) -> bool:
        """Whether the path names another file by now that is not empty."""
        try:
            there = os.stat(self._path)
            here = os.fstat(file)
        except OSError:
            return False
        return there.st_size > 0 and (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _finish_file(self) -> bytes:
        """Close the file and return its last line, if it has one without an end."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return self._assembler.last()

    def _whole_lines(self, file: int, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        if end := self._assembler.last_end(data):
            self._line_offset = self._offset - len(data) + end
        if b"\0" in data:
            data = data.replace(b"\0", b"")
            if not data:
                self._offset = _next_data(file, self._offset, self._offset)
        return self._assembler.add(data)


def _next_data(file: int, offset: int, otherwise: int) -> int:
    """Where at or behind ``offset`` there is something else than a hole."""
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError:
        return otherwise
