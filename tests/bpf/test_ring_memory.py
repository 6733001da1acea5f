"""The ring buffer reader on simulated ring memory, with a producer that follows the kernel's rules.

The oracle is a plain list: what was committed, in order, without what was discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import schema
from kvprobe.bpf.ring import BUSY, DISCARDED, HEADER_BYTES, Ring
from kvprobe.errors import KvprobeError

ROW = schema.numpy_dtype(schema.OPS)
STRIDE = HEADER_BYTES + ROW.itemsize
SIZE = 1024  # sixteen records of 64 bytes
assert SIZE % STRIDE == 0


@dataclass
class Memory:
    """A ring as the kernel side keeps it. ``size`` need not be a multiple of a record."""

    size: int = SIZE
    table: schema.Table = schema.OPS
    reserved: list[tuple[int, int]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.row = schema.numpy_dtype(self.table)
        self.first = self.table.columns[0].name
        self.stride = HEADER_BYTES + self.row.itemsize
        self.consumer = np.zeros(1, np.uint64)
        self.producer = np.zeros(1, np.uint64)
        self.data = np.full(2 * self.size, 0xAA, np.uint8)  # ring memory is not zeroed

    def ring(self, *, ordered: bool = True) -> Ring:
        return Ring(self.table, self.consumer, self.producer, self.data, ordered=ordered)

    def reserve(self) -> bool:
        """As bpf_ringbuf_reserve: False where the ring is full."""
        at = int(self.producer[0])
        if at + self.stride - int(self.consumer[0]) > self.size:
            return False
        self.reserved.append((at, self.serial))
        self._write(at, np.array([self.row.itemsize | BUSY, 0], "<u4").tobytes())
        self.producer[0] = at + self.stride
        self.serial += 1
        return True

    def finish(self, which: int, *, discard: bool) -> None:
        """As bpf_ringbuf_submit or bpf_ringbuf_discard of one of the open records."""
        at, serial = self.reserved.pop(which)
        rows = np.zeros(1, self.row)
        rows[self.first] = serial
        self._write(at + HEADER_BYTES, rows.tobytes())
        flags = DISCARDED if discard else 0
        self._write(at, np.array([self.row.itemsize | flags], "<u4").tobytes())
        if not discard:
            self.committed.append(serial)

    def _write(self, at: int, content: bytes) -> None:
        for index, byte in enumerate(content):
            place = (at + index) % self.size
            self.data[place] = self.data[place + self.size] = byte


STEPS = st.lists(
    st.one_of(
        st.just(("reserve", 0)),
        st.just(("reserve", 0)),
        st.tuples(st.sampled_from(["commit", "discard"]), st.integers(0, 40)),
        st.just(("drain", 0)),
    ),
    max_size=200,
)


@given(steps=STEPS, ordered=st.booleans(), table=st.sampled_from([schema.OPS, schema.BLOCK]))
def test_whatever_happens_rows_arrive_once_in_order_and_complete(
    steps: list[tuple[str, int]], ordered: bool, table: schema.Table
) -> None:
    memory = Memory(table=table)
    ring = memory.ring(ordered=ordered)
    arrived: list[int] = []
    for step, number in steps:
        if step == "reserve":
            memory.reserve()
        elif step == "drain":
            arrived += ring.drain()[memory.first].tolist()
        elif memory.reserved:
            memory.finish(number % len(memory.reserved), discard=step == "discard")
        # Nothing unfinished, nothing twice, nothing out of order, nothing past an open record.
        first_open = min((serial for _, serial in memory.reserved), default=memory.serial)
        due = sorted(serial for serial in memory.committed if serial < first_open)
        assert arrived == due[: len(arrived)]
    while memory.reserved:
        memory.finish(0, discard=False)
    for _ in range(2):
        arrived += ring.drain()[memory.first].tolist()
    assert arrived == sorted(memory.committed)
    assert ring.rows == len(arrived)
    assert memory.consumer[0] == memory.producer[0]


def test_an_unfinished_record_holds_back_those_behind_it() -> None:
    memory = Memory()
    ring = memory.ring()
    for _ in range(3):
        memory.reserve()
    memory.finish(1, discard=False)
    memory.finish(1, discard=False)
    assert len(ring.drain()) == 0
    memory.finish(0, discard=False)
    assert ring.drain()["start_ns"].tolist() == [0, 1, 2]


def test_without_ordered_loads_a_row_is_taken_one_poll_later() -> None:
    memory = Memory()
    ring = memory.ring(ordered=False)
    memory.reserve()
    memory.finish(0, discard=False)
    assert len(ring.drain()) == 0
    assert len(ring.drain()) == 1


def test_rows_are_copies_that_outlive_the_ring() -> None:
    memory = Memory()
    ring = memory.ring()
    memory.reserve()
    memory.finish(0, discard=False)
    rows = ring.drain()
    memory.data[:] = 0
    ring.close()
    assert rows["start_ns"].tolist() == [0]


@pytest.mark.parametrize("length", [0, 8, ROW.itemsize - 8, ROW.itemsize + 8, 0x3FFFFFFF])
def test_a_foreign_record_length_is_an_error_not_a_loop(length: int) -> None:
    memory = Memory()
    ring = memory.ring()
    for _ in range(2):
        memory.reserve()
        memory.finish(0, discard=False)
    memory._write(STRIDE, np.array([length], "<u4").tobytes())
    with pytest.raises(KvprobeError, match="ring buffer of table ops is damaged"):
        ring.drain()


@pytest.mark.parametrize(("consumer", "producer"), [(64, 0), (0, SIZE + STRIDE), (0, STRIDE - 8)])
def test_positions_that_cannot_be_are_an_error(consumer: int, producer: int) -> None:
    memory = Memory()
    memory.consumer[0], memory.producer[0] = consumer, producer
    with pytest.raises(KvprobeError, match="bytes between its positions"):
        memory.ring().drain()
