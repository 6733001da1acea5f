"""What a call of a Python function for each row costs: bcc's ring buffer and perf buffer.

Run as ``python -m benchmarks.rivals.callbacks REPEATS``; prints nanoseconds for each row, by name.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.rivals.perf_buffer import compile_text
from kvprobe import schema
from kvprobe.bpf import attach

_ROWS = 100_000
_ROWS_PER_RUN = 20
_LATENCY_NS = 10_007
_PAGES = 4096
_TEST_RUN = 10
_RAW_TRACEPOINT = 17

_TEXT = (
    schema.c_struct(schema.BLOCK)
    + f"""
BPF_RINGBUF_OUTPUT(ring, {_PAGES});
BPF_PERF_OUTPUT(perf);

int fill_ring(void *ctx)
{{
	struct kv_block row = {{.done_ns = {_LATENCY_NS}}};

	_Pragma("unroll") for (int i = 0; i < {_ROWS_PER_RUN}; i++)
		ring.ringbuf_output(&row, sizeof(row), 1);
	return 0;
}}

int fill_perf(struct bpf_raw_tracepoint_args *ctx)
{{
	struct kv_block row = {{.done_ns = {_LATENCY_NS}}};

	_Pragma("unroll") for (int i = 0; i < {_ROWS_PER_RUN}; i++)
		perf.perf_submit(ctx, &row, sizeof(row));
	return 0;
}}
"""
)


class _Callback:
    """The classic one: make an object of the record, use a member."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.rows = self.sum_ns = 0

    def take(self, _: Any, data: Any, size: int) -> int:
        event = self._table.event(data)
        self.rows += 1
        self.sum_ns += event.done_ns - event.queued_ns
        return 0  # None would cost bcc an exception for each row of a ring


def _timed(
    fill: Callable[[], None], drain: Callable[[], None], callback: _Callback, repeats: int
) -> list[float]:
    samples = []
    for _ in range(repeats):
        callback.rows = callback.sum_ns = 0
        fill()
        began = time.thread_time_ns()
        drain()
        samples.append((time.thread_time_ns() - began) / max(1, callback.rows))
        assert callback.rows == _ROWS, callback.rows
        assert callback.sum_ns == _ROWS * _LATENCY_NS
    return samples


def _filler(program: Any, name: bytes) -> Callable[[], None]:
    descriptor = program.load_func(name, _RAW_TRACEPOINT).fd
    request = struct.pack("=IIIIQQ", descriptor, 0, 0, 0, 0, 0)

    def fill() -> None:
        for _ in range(_ROWS // _ROWS_PER_RUN):
            attach.bpf(_TEST_RUN, request)

    return fill


def main() -> None:
    """Measure both."""
    repeats = int(sys.argv[1])
    program = compile_text(_TEXT, [])
    ring, perf = _Callback(program["ring"]), _Callback(program["perf"])
    program["ring"].open_ring_buffer(ring.take)
    program["perf"].open_perf_buffer(perf.take, page_cnt=_PAGES)
    fill_ring, fill_perf = _filler(program, b"fill_ring"), _filler(program, b"fill_perf")

    def drain_perf() -> None:
        before = -1
        while before != perf.rows:
            before = perf.rows
            program.perf_buffer_poll(timeout=0)

    measured = {
        "bcc ring buffer, callback": _timed(fill_ring, program.ring_buffer_consume, ring, repeats),
        "bcc perf buffer, callback": _timed(fill_perf, drain_perf, perf, repeats),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
