"""Two loaders, attached at once to the same events, must tell the same story.

Not a comparison of two runs: every event runs both programs, so rows have to be equal one by one,
and their times may differ only by what one program takes after the other.

What kvprobe does on older kernels is among them: the plain object (before 6.2), and requests that
begin as bios (before 6.5, without block_io_start) work on any kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvprobe import schema
from kvprobe.bpf import bcc_loader, core_object
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.kernel_types import KernelTypes
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters, Rows

from .conftest import MIB, Collected, LoopFs, drain, retry_unseen, run_fio, run_python

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        not (bcc_loader.DEBIAN_PACKAGES / "bcc").is_dir(), reason="python3-bpfcc is not installed"
    ),
]

CORE = "core"
OLDER = "plain, without block_io_start"
OTHERS = ("bcc", "plain", OLDER, "bcc, without block_io_start")
SLACK_NS = 20_000_000
"""A machine that is busy with other things can take long between two programs of one event."""

CALLS = """
import mmap, os, sys
root, path = sys.argv[1:]
fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 28672)
for n in range(101):
    os.preadv(fd, [buffer], n * 28672)
os.close(fd)
fd = os.open(path, os.O_RDONLY)
for n in range(53):
    os.pread(fd, 4999, n * 40961)
    os.readv(fd, [bytearray(1009), bytearray(3001)])
os.read(fd, 77)
os.close(fd)
new = os.path.join(root, "folder", "new")
os.makedirs(os.path.dirname(new), exist_ok=True)
fd = os.open(new + ".tmp", os.O_CREAT | os.O_WRONLY)
os.pwrite(fd, bytes(65537), 0)
os.writev(fd, [b"a" * 513, b"b" * 7])
os.fsync(fd)
os.close(fd)
os.rename(new + ".tmp", new)
os.chdir(root)
for name in (new, new + ".none", "folder/new", "folder/none", path):
    os.access(name, os.R_OK)
    try:
        os.stat(name)
        os.close(os.open(name, os.O_RDONLY))
    except OSError:
        pass
"""


def opened(variant: str, filters: Filters) -> Session:
    """A session on a kernel that is said to lack something."""
    tracepoint_args = KernelTypes.tracepoint_args

    def of_older_kernel(types: KernelTypes, name: str) -> int | None:
        return None if name == "block_io_start" else tracepoint_args(types, name)

    with pytest.MonkeyPatch.context() as patch:
        if "plain" in variant:
            patch.setattr(core_object, "must_be_plain", lambda kernel: True)
        if "without" in variant:
            patch.setattr(KernelTypes, "tracepoint_args", of_older_kernel)
        session = open_session(None, filters, "bcc" if "bcc" in variant else "core")
    older = "without" in variant or Btf.load().tracepoint_args("block_io_start") is None
    begins = "block_getrq" if older else "block_io_start"
    assert {"block_getrq", "block_io_start"} & set(session.attached["block"]) == {begins}
    return session


MERGED = """
import ctypes, mmap, os, platform, struct, sys
path, *orders = sys.argv[1:]
SETUP, SUBMIT, EVENTS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}[platform.machine()]
call = ctypes.CDLL(None, use_errno=True).syscall
fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
context = ctypes.c_ulong()
assert call(SETUP, 128, ctypes.byref(context)) == 0
for number, order in enumerate(orders):
    blocks = [int(n) for n in order.split(",")]
    made = [
        ctypes.create_string_buffer(
            struct.pack("=QIIHhIQQqQII", n, 0, 0, 0, 0, fd, address + 4096 * n, 4096,
                        (number << 20) + 4096 * n, 0, 0, 0))
        for n in blocks
    ]
    array = (ctypes.c_void_p * len(made))(*map(ctypes.addressof, made))
    assert call(SUBMIT, context, ctypes.c_long(len(made)), array) == len(made)
    done = ctypes.create_string_buffer(32 * len(made))
    n = ctypes.c_long(len(made))
    assert call(EVENTS, context, n, n, done, None) == len(made)
"""
"""Direct reads of 4 KiB, submitted together in the given orders, one order in each MiB."""
ORDERS = {
    "forward": range(61),
    "backward": range(60, -1, -1),
    "both ways": [*range(30, -1, -1), *range(31, 61)],
    "as it comes": [7 * n % 61 for n in range(61)],
}


@contextmanager
def both(filters: Filters, other: str = "bcc") -> Iterator[dict[str, Session]]:
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(opened(name, filters)) for name in (CORE, other)}
        for session in sessions.values():
            session.poll()  # files that were open before differ only in when they were looked at
        yield sessions


def collect(sessions: dict[str, Session]) -> dict[str, Collected]:
    return {name: drain(session) for name, session in sessions.items()}


def ordered(table: schema.Table, rows: Rows) -> tuple[list[tuple[object, ...]], Rows]:
    """Rows without times and identities, sorted, and the rows themselves in the same order."""
    names = [column.name for column in table.columns]
    untimed = [name for name in names if not name.endswith("_ns") and name != "request"]
    keys = [tuple(row.tolist()) for row in rows[untimed]]
    order = sorted(range(len(rows)), key=lambda at: (keys[at], tuple(rows[at].tolist())))
    return [keys[at] for at in order], rows[order]


def assert_equal(found: dict[str, Collected], table: schema.Table, at_least: int) -> None:
    (core, core_rows), (other, other_rows) = (
        ordered(table, rows[table.name]) for rows in found.values()
    )
    assert len(core) >= at_least
    assert core == other
    if table is schema.BLOCK:  # the request's address, behind each session's secret
        assert len(set((core_rows["request"] ^ other_rows["request"]).tolist())) == 1
    for column in table.columns:
        if column.name.endswith("_ns"):
            one, two = (r[column.name].astype(np.int64) for r in (core_rows, other_rows))
            assert ((one == 0) == (two == 0)).all(), column.name
            assert np.abs(one - two).max() < SLACK_NS, column.name


def work(loop_fs: LoopFs) -> Path:
    path = loop_fs.file("agree")
    run_python(CALLS, loop_fs.mountpoint, path)
    run_fio(path, "--rw=randread", "--bs=20k", "--direct=1", "--ioengine=libaio", "--iodepth=5")
    run_fio(path, "--rw=randread", "--bs=12k", "--direct=1", "--ioengine=io_uring", "--iodepth=7")
    return path


def check(found: dict[str, Collected]) -> None:
    assert_equal(found, schema.BLOCK, 101 + 16 * MIB // 20480 + 16 * MIB // 12288)
    assert_equal(found, schema.OPS, 101 + 2 * 53 + 16 * MIB // 20480 + 16 * MIB // 12288)
    assert_equal(found, schema.LOOKUPS, 15)


@pytest.mark.parametrize("other", OTHERS)
@retry_unseen
def test_rows_below_a_root(loop_fs: LoopFs, other: str) -> None:
    with both(loop_fs.filters, other) as sessions:
        work(loop_fs)
        check(collect(sessions))
        assert sessions[other].losses() == sessions[CORE].losses()


@pytest.mark.parametrize("other", ["bcc", OLDER])
@retry_unseen
def test_rows_of_a_process_and_its_children(loop_fs: LoopFs, other: str) -> None:
    with both(Filters(tgids=(os.getpid(),), device=loop_fs.dev_t), other) as sessions:
        work(loop_fs)
        check(collect(sessions))


@pytest.mark.parametrize("other", [OLDER, "bcc, without block_io_start"])
@retry_unseen
def test_requests_that_were_merged(loop_fs: LoopFs, other: str) -> None:
    """A bio merged in front takes the first place, which tells an older kernel's requests apart."""
    path = loop_fs.file("merged")
    with both(loop_fs.filters, other) as sessions:
        run_python(MERGED, path, *(",".join(map(str, order)) for order in ORDERS.values()))
        found = collect(sessions)
    assert_equal(found, schema.BLOCK, len(ORDERS))
    rows = found[CORE]["block"]
    assert int(rows["bytes"].sum()) == 61 * 4096 * len(ORDERS)
    assert len(rows) < 61 * len(ORDERS) / 2, "nothing was merged: this test tested nothing"


@pytest.mark.parametrize("other", ["bcc", OLDER])
@retry_unseen
def test_aggregates(loop_fs: LoopFs, other: str) -> None:
    """Depth and histogram count requests of the device; latencies may fall into the next bucket."""
    path = loop_fs.file("aggregates")
    with both(Filters(device=loop_fs.dev_t), other) as sessions:
        for session in sessions.values():
            session.aggregates()
        run_fio(path, "--rw=randrw", "--bs=8k", "--direct=1", "--ioengine=libaio", "--iodepth=3")
        drained = collect(sessions)
        found = {name: session.aggregates() for name, session in sessions.items()}
    expected = 16 * MIB // 8192
    for name in (CORE, other):
        histogram = found[name]["histogram"]
        mine = histogram[histogram["device"] == loop_fs.dev_t]
        assert mine["requests"].sum() >= expected
        sizes = np.unique(mine["size_low_bytes"])
        for column in ("requests", "bytes"):
            per_size = [
                [
                    int(
                        part[column][(part["size_low_bytes"] == s) & (part["direction"] == d)].sum()
                    )
                    for s in sizes
                    for d in (0, 1)
                ]
                for part in (found[loader]["histogram"] for loader in (CORE, other))
            ]
            assert per_size[0] == per_size[1], column
        depth = found[name]["depth"]
        mine = depth[depth["device"] == loop_fs.dev_t]
        assert int(mine["depth"].max()) == int(found["core"]["depth"]["depth"].max())
    assert len(drained[CORE]["block"]) == len(drained[other]["block"])
