"""Which operations are below a cuFile call, which path the bytes took, on hand-made frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvprobe import notes
from kvprobe.correlator import gds
from kvprobe.correlator.gds import DataPath, GpuDirect
from kvprobe.correlator.tie import tie
from kvprobe.model import Frame
from kvprobe.schema import OpKind
from tests.correlator.rows import block, frame, op

MIB = 1 << 20


def call(start: int, end: int, **more: Any) -> dict[str, Any]:
    return op(start, end, **({"kind": OpKind.CUFILE_READ, "requested": MIB, "direct": 0} | more))


def analyse(
    ops: list[dict[str, Any]],
    rows: list[dict[str, Any]] | None = None,
    host: list[tuple[str, float]] | None = None,
    left_out: bool = False,
    p2pdma: str | None = None,
) -> GpuDirect:
    made = gds.layers(frame("ops", ops))
    requests = frame("block", rows or [])
    owner = made.owner(tie(requests, made.every))
    setting = {"name": "properties.use_pci_p2pdma", "subject": "host", "value": p2pdma}
    knobs = frame("knobs", [setting] if p2pdma else [])
    found = gds.account(made, requests, owner, host_frame(host or []), knobs, left_out)
    assert found
    return found


def host_frame(values: list[tuple[str, float]]) -> Frame:
    return frame(
        "host",
        [
            {"time_ns": at, "metric": name, "subject": "", "value": value}
            for at, (name, value) in enumerate(values)
        ],
    )


def chunks(start: int, end: int, of: int = 4, **more: Any) -> list[dict[str, Any]]:
    """The system calls that serve one call of 1 MiB, by other threads."""
    size = MIB // of
    return [op(start, end, offset=n * size, requested=size, tid=100 + n, **more) for n in range(of)]


def test_what_the_library_reads_for_a_call_is_below_it_and_nothing_else_is() -> None:
    ops = [
        call(100, 200, offset=0),
        *chunks(110, 190),
        op(110, 190, offset=MIB, tid=7),  # beyond the call's range
        op(110, 190, offset=0, inode=8),  # another file
        op(110, 190, offset=0, tgid=11),  # another process
        op(110, 190, offset=0, kind=OpKind.PWRITE64),  # the other direction
        op(90, 150, offset=0),  # began before
        op(150, 210, offset=0),  # ended after
        call(300, 400, offset=0),
        *chunks(310, 390),
    ]
    made = gds.layers(frame("ops", ops))
    assert made.below.tolist() == [-1, 0, 0, 0, 0, *[-1] * 6, -1, *[11] * 4]
    assert len(made.ops["start_ns"]) == 8
    assert made.counts_for.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
    assert made.owner(np.array([-1, 3, 10, 14])).tolist() == [-1, 0, 6, 7]


def test_calls_on_one_file_at_once_keep_their_own() -> None:
    ops = [call(100, 900 + n, offset=n * MIB, tid=50 + n) for n in range(31)]
    ops += [op(200 + n, 800, offset=n * MIB + 4096, tid=99) for n in range(31)]
    made = gds.layers(frame("ops", ops))
    assert made.below[31:].tolist() == list(range(31))


def test_a_call_without_system_calls_passes_no_page_cache() -> None:
    made = gds.layers(frame("ops", [call(1, 2, direct=0), op(3, 4, direct=0)]))
    assert made.ops["direct"].tolist() == [1, 0]


def test_without_cufile_nothing_changes() -> None:
    plain = frame("ops", [op(1, 2), op(3, 4, kind=OpKind.WRITE)])
    made = gds.layers(plain)
    assert made.ops is plain and made.counts_for.tolist() == [0, 1]
    nothing = frame("block", [])
    assert gds.account(made, nothing, np.empty(0, np.int64), host_frame([]), {}, False) is None


def test_handed_over_transfers_are_counted_and_are_no_operations() -> None:
    kinds = (OpKind.CUFILE_READ_ASYNC, OpKind.CUFILE_READ_BATCH, OpKind.CUFILE_WRITE_BATCH)
    ops = [call(n, n + 1, kind=kind, result=0) for kind in kinds for n in range(13)]
    ops += chunks(5, 6)
    made = gds.layers(frame("ops", ops))
    assert len(made.ops["start_ns"]) == 4
    found = analyse(ops)
    assert (found.reads.handed_over, found.reads.handed_over_bytes) == (26, 26 * MIB)
    assert (found.writes.handed_over, found.reads.calls) == (13, 0)
    assert found.path is DataPath.UNKNOWN and "handed over" in found.why


def test_a_batch_that_was_told_to_be_done_is_an_operation() -> None:
    ops = [call(n, n + 1, kind=OpKind.CUFILE_READ_BATCH, result=0) for n in range(17)]
    ops += [call(n, 900, kind=OpKind.CUFILE_READ_DONE, offset=n * MIB) for n in range(11)]
    ops += [call(20, 21, kind=OpKind.CUFILE_READ_BATCH, result=-5013)]
    ops += chunks(40, 50)
    found = analyse(ops)
    assert (found.reads.calls, found.reads.bytes) == (11, 11 * MIB)
    assert (found.reads.handed_over, found.reads.handed_over_bytes) == (6, 6 * MIB)
    assert (found.reads.failed, found.reads.below_bytes) == (1, MIB)
    assert len(gds.layers(frame("ops", ops)).ops["start_ns"]) == 11


@pytest.mark.parametrize("direct", [0, 1])
def test_compatibility_mode(direct: int) -> None:
    ops = [call(100, 200), *chunks(110, 190, direct=direct)]
    rows = [
        block(120, 180, offset=n * MIB // 4, bytes=MIB // 4, tid=100 + n) for n in range(4 * direct)
    ]
    found = analyse(ops, rows)
    assert found.path is DataPath.COMPAT
    assert (found.reads.below_ops, found.reads.below_bytes) == (4, MIB)
    assert found.reads.unseen_bytes == 0
    assert found.reads.block_bytes == direct * MIB
    # Whether the page cache is passed is what the library does, not how the file was opened.
    made = gds.layers(frame("ops", ops))
    assert made.ops["direct"].tolist() == [direct]


@pytest.mark.parametrize(
    ("direct", "setting", "path"),
    [
        (1, "True", DataPath.UNKNOWN),
        (1, "False", DataPath.COMPAT),
        (0, "True", DataPath.COMPAT),  # peer-to-peer DMA is direct I/O
    ],
)
def test_direct_system_calls_may_be_peer_to_peer_dma(
    direct: int, setting: str, path: DataPath
) -> None:
    found = analyse([call(100, 200), *chunks(110, 190, direct=direct)], p2pdma=setting)
    assert found.path is path
    assert ("peer-to-peer" in found.why) is (path is DataPath.UNKNOWN)


def test_the_driver_s_own_pieces_belong_to_the_call() -> None:
    """nvidia-fs cuts a call into operations of its own, in the caller's thread."""
    rows = [block(120, 180, offset=n * MIB // 4, bytes=MIB // 4) for n in range(4)]
    found = analyse([call(100, 200)], rows)
    assert found.path is DataPath.NATIVE and "no system call" in found.why
    assert (found.reads.block_requests, found.reads.block_bytes) == (4, MIB)
    assert not notes.gpu_direct(found)


def test_the_driver_s_counters_tell_the_native_path() -> None:
    ops = [call(100 * n, 100 * n + 50) for n in range(1, 12)]
    before, after = ("gds_read_bytes", 5.0 * MIB), ("gds_read_bytes", 16.0 * MIB)
    found = analyse(
        ops, host=[("gds_driver", 1), before, ("gds_reads", 7), after, ("gds_reads", 18)]
    )
    assert found.path is DataPath.NATIVE
    assert (found.driver.loaded, found.driver.reads, found.driver.read_bytes) == (
        True,
        11,
        11 * MIB,
    )
    assert found.reads.unseen_bytes == 11 * MIB
    (said,) = notes.gpu_direct(found)
    assert said.startswith("11.0 MiB of 11.0 MiB of cuFile reads had neither a system call nor")


def test_counters_that_were_reset_go_on_from_zero() -> None:
    steps = [5, 9, 2, 3]
    host = [("gds_read_bytes", float(n * MIB)) for n in steps]
    assert analyse([call(1, 2)], host=host).driver.read_bytes == (4 + 2 + 1) * MIB


@pytest.mark.parametrize(
    ("host", "loaded", "why"),
    [
        ([], None, "nvidia-fs was not asked"),
        ([("cpu_busy_ns", 1.0)], False, "nvidia-fs is not loaded"),
        ([("gds_driver", 1.0)], True, "has not counted"),
    ],
)
def test_what_nobody_saw_is_unknown_and_said(
    host: list[tuple[str, float]], loaded: bool | None, why: str
) -> None:
    found = analyse([call(100, 200)], host=host)
    assert found.path is DataPath.UNKNOWN and why in found.why
    assert found.driver.loaded is loaded
    assert found.driver.read_bytes is None
    assert found.reads.unseen_bytes == MIB


def test_half_and_half_is_mixed() -> None:
    ops = [call(100, 200), *chunks(110, 190), call(300, 400)]
    found = analyse(ops)
    assert found.path is DataPath.MIXED
    assert (found.reads.below_bytes, found.reads.unseen_bytes) == (MIB, MIB)


def test_block_rows_that_were_left_out_leave_unknown() -> None:
    found = analyse([call(100, 200)], left_out=True)
    assert found.reads.block_bytes is found.reads.unseen_bytes is None
    assert found.path is DataPath.UNKNOWN and "left out" in found.why
    assert not notes.gpu_direct(found)


def test_calls_without_a_file_are_counted_apart() -> None:
    ops = [call(100, 200, inode=None, fs_device=None), *chunks(110, 190)]
    made = gds.layers(frame("ops", ops))
    assert len(made.ops["start_ns"]) == 5  # the system calls keep what they read
    found = analyse(ops)
    assert (found.reads.calls, found.reads.nameless_calls) == (1, 1)
    assert found.reads.nameless_bytes == MIB and found.reads.unseen_bytes == 0
    assert "older than the recording" in found.why
    assert "no file" in notes.gpu_direct(found)[0]


def test_errors_are_counted_and_transfer_nothing() -> None:
    found = analyse([call(1, 2, result=-1), call(3, 4, result=-5030), call(5, 6, result=0)])
    assert (found.reads.calls, found.reads.failed, found.reads.bytes) == (0, 2, 0)
    assert found.path is DataPath.UNKNOWN and "no call transferred" in found.why


def test_writes_are_apart_from_reads() -> None:
    ops = [call(100, 200, kind=OpKind.CUFILE_WRITE)]
    ops += chunks(110, 190, kind=OpKind.PWRITE64)
    found = analyse(ops)
    assert (found.reads.calls, found.writes.calls, found.writes.below_bytes) == (0, 1, MIB)
    assert found.path is DataPath.COMPAT


def test_every_kind_is_a_read_or_a_write_by_its_number() -> None:
    for kind in OpKind:
        assert kind.is_write == ("WRITE" in kind.name or kind.name == "WRITE")
