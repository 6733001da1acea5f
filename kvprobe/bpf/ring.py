"""Read a BPF ring buffer where it lies: map it, decode whole spans with numpy, copy them out.

Layout (kernel/bpf/ringbuf.c): a page with the consumer's position, a page with the producer's,
then the data, mapped twice in a row so that a span never wraps. A record is a header of two
32-bit words (length with the flags busy and discarded; page offset) and its bytes, padded to 8.
All records of one ring have one size here, so a span is a structured array.
"""

from __future__ import annotations

import mmap
import platform

import numpy as np
from numpy.typing import NDArray

from kvprobe import schema
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Rows

BUSY = 1 << 31
DISCARDED = 1 << 30
HEADER_BYTES = 8

ORDERED = platform.machine() in ("x86_64", "i686")
"""Loads happen in program order; elsewhere a row is taken one poll after its header said done."""


class Ring:
    """The consumer of one ring buffer.

    Args:
        table: whose rows it carries.
        consumer: the consumer's position, one 64-bit word, written here.
        producer: the producer's position, one 64-bit word, read only.
        data: twice the ring's bytes, the second half showing the first again.
        ordered: see ``ORDERED``.
    """

    def __init__(
        self,
        table: schema.Table,
        consumer: NDArray[np.uint64],
        producer: NDArray[np.uint64],
        data: NDArray[np.uint8],
        *,
        ordered: bool = ORDERED,
    ) -> None:
        self.table = table
        self.size_bytes = len(data) // 2
        self.rows = 0
        self._row = schema.numpy_dtype(table)
        # As plain bytes a row is copied at once; by its columns, numpy copies one at a time.
        self._bytes = np.dtype(f"V{self._row.itemsize}")
        self._record = np.dtype([("length", "<u4"), ("page", "<u4"), ("row", self._bytes)])
        if self._record.itemsize % 8:
            raise ValueError(f"rows of {table.name} are no multiple of 8 bytes")
        self._consumer, self._producer, self._data = consumer, producer, data
        self._ordered = ordered
        self._checked = int(consumer[0])
        self._mappings: tuple[mmap.mmap, ...] = ()

    @classmethod
    def of_map(cls, table: schema.Table, descriptor: int, size_bytes: int) -> Ring:
        """Map the ring buffer behind a descriptor.

        Raises:
            OSError: it is no ring buffer of that size.
        """
        page = mmap.PAGESIZE
        ours = mmap.mmap(descriptor, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        theirs = mmap.mmap(
            descriptor, page + 2 * size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        ring = cls(
            table,
            np.frombuffer(ours, np.uint64, 1),
            np.frombuffer(theirs, np.uint64, 1),
            np.frombuffer(theirs, np.uint8, 2 * size_bytes, page),
        )
        ring._mappings = (ours, theirs)
        return ring

    def drain(self) -> Rows:
        """Every finished row up to the first unfinished one, in order; releases their space.

        Raises:
            KvprobeError: positions or headers are not those of a ring with such rows.
        """
        start = int(self._consumer[0])
        if start == int(self._producer[0]):
            return np.empty(0, self._row)
        records = self._records(start)
        ready = self._finished(records, start)
        if self._ordered:
            take = ready
        else:
            take = min(ready, (self._checked - start) // self._record.itemsize)
            self._checked = start + ready * self._record.itemsize
        records = records[:take]
        discarded = (records["length"] & DISCARDED) != 0
        kept = records["row"][~discarded] if discarded.any() else records["row"]
        rows = np.empty(len(kept), self._row)
        rows.view(self._bytes)[:] = kept
        self._consumer[0] = start + take * self._record.itemsize
        self.rows += len(rows)
        return rows

    def close(self) -> None:
        """Unmap; the ring must not be used afterwards."""
        empty = np.zeros(0, np.uint64)
        self._consumer = self._producer = empty
        self._data = np.zeros(0, np.uint8)
        for mapping in self._mappings:
            mapping.close()
        self._mappings = ()

    def _records(self, start: int) -> Rows:
        """All that producers have reserved, finished or not."""
        filled = int(self._producer[0]) - start
        if not 0 <= filled <= self.size_bytes or filled % self._record.itemsize:
            raise self._corrupt(f"{filled} bytes between its positions")
        at = start & (self.size_bytes - 1)
        return self._data[at : at + filled].view(self._record)

    def _finished(self, records: Rows, start: int) -> int:
        """How many records from the first on are finished; their headers are checked."""
        lengths = records["length"]
        busy = (lengths & BUSY) != 0
        ready = int(busy.argmax()) if busy.any() else len(records)
        wrong = (lengths[:ready] & ~np.uint32(DISCARDED)) != self._row.itemsize
        if wrong.any():
            index = int(wrong.argmax())
            length = int(lengths[index])
            raise self._corrupt(f"a record of length {length:#x} at {start} + {index} records")
        return ready

    def _corrupt(self, what: str) -> KvprobeError:
        return KvprobeError(
            f"the ring buffer of table {self.table.name} is damaged: {what}",
            "please report this, with the kernel's version: kvprobe doctor",
            ExitCode.INCOMPLETE,
        )
