"""Rows of reads and writes against processes that did a known, prime number of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from kvprobe.bpf.session import open_session
from kvprobe.model import Filters, Rows
from kvprobe.schema import U64_MAX, OpKind

from .conftest import LoopFs, Watch, kinds_of, retry_unseen, rows_of, run_fio, run_python

pytestmark = pytest.mark.root

CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None)  # os.preadv and os.pwritev call the second versions
space = [ctypes.create_string_buffer(size) for size in (2000, 3000)]
segments = (ctypes.c_uint64 * 4)(*(n for b in space for n in (ctypes.addressof(b), len(b))))
kind, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = os.open(path, os.O_RDWR)
data = bytes(5000)
for n in range(count):
    at = n * 6007
    if kind == "READ": os.lseek(fd, at, 0); os.read(fd, 5000)
    elif kind == "PREAD64": os.pread(fd, 5000, at)
    elif kind == "READV": os.lseek(fd, at, 0); os.readv(fd, [bytearray(2000), bytearray(3000)])
    elif kind == "PREADV": libc.preadv(fd, segments, 2, ctypes.c_long(at))
    elif kind == "PREADV2": os.preadv(fd, [bytearray(2000), bytearray(3000)], at, 1)
    elif kind == "WRITE": os.lseek(fd, at, 0); os.write(fd, data)
    elif kind == "PWRITE64": os.pwrite(fd, data, at)
    elif kind == "WRITEV": os.lseek(fd, at, 0); os.writev(fd, [data[:1000], data[1000:]])
    elif kind == "PWRITEV": libc.pwritev(fd, segments, 2, ctypes.c_long(at))
    elif kind == "PWRITEV2": os.pwritev(fd, [data[:1000], data[1000:]], at, os.RWF_DSYNC)
print(os.getpid())
"""
OTHERS = ("URING", "LIBAIO", "CUFILE")
SYSTEM_CALLS = [kind for kind in OpKind if not kind.name.startswith(OTHERS)]


def collect(watch: Watch, code: str, *arguments: object) -> tuple[Rows, str]:
    watch.begin()
    printed = run_python(code, *arguments)
    return watch.session.poll()["ops"], printed


@pytest.mark.parametrize("kind", SYSTEM_CALLS, ids=lambda kind: kind.name)
def test_every_system_call_is_one_row(loop_fs: LoopFs, watch: Watch, kind: OpKind) -> None:
    path = loop_fs.file(size=1 << 20)
    before = time.monotonic_ns()
    rows, printed = collect(watch, CALLS, kind.name, path, 113)
    after = time.monotonic_ns()
    assert len(rows) == len(rows_of(rows, path)) == 113
    assert kinds_of(rows) == {kind}
    assert rows["offset"].tolist() == [n * 6007 for n in range(113)]
    assert set(rows["requested"]) == set(rows["result"]) == {5000}
    assert set(rows["tgid"]) == set(rows["tid"]) == {int(printed)}
    assert not rows["direct"].any()
    assert (rows["start_ns"] < rows["end_ns"]).all()
    assert before < rows["start_ns"].min()
    assert rows["end_ns"].max() < after


def test_the_thread_is_told_apart_from_its_process(loop_fs: LoopFs, watch: Watch) -> None:
    path = loop_fs.file(size=1 << 20)
    code = """
    import os, sys, threading
    fd = os.open(sys.argv[1], os.O_RDONLY)
    def read(n):
        for i in range(53):
            os.pread(fd, 100, n * 100)
        print(threading.get_native_id(), flush=True)
    threads = [threading.Thread(target=read, args=(n,)) for n in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    """
    rows, printed = collect(watch, code, path)
    tids, counts = np.unique(rows["tid"], return_counts=True)
    assert sorted(tids.tolist()) == sorted(int(tid) for tid in printed.split())
    assert counts.tolist() == [53, 53, 53]
    assert len(np.unique(rows["tgid"])) == 1


def test_failures_end_of_file_and_appending_are_rows_with_their_truth(
    loop_fs: LoopFs, watch: Watch
) -> None:
    path = loop_fs.file(size=70_001)
    code = """
    import ctypes, os, sys
    path = sys.argv[1]
    reader, writer = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY | os.O_APPEND)
    assert len(os.pread(reader, 4096, 70_000)) == 1
    assert os.pread(reader, 4096, 70_001) == b""
    os.write(writer, b"x" * 11)
    os.write(writer, b"y" * 13)
    for fd, call in ((writer, lambda: os.pread(writer, 17, 0)), (reader, lambda: os.write(reader, b"z"))):
        try:
            call()
        except OSError:
            pass
    assert len(os.read(reader, 29)) == 29
    assert len(os.read(reader, 31)) == 31
    libc = ctypes.CDLL(None)
    space = ctypes.create_string_buffer(37)
    segment = (ctypes.c_uint64 * 2)(ctypes.addressof(space), 37)
    assert libc.preadv2(reader, segment, 1, ctypes.c_long(-1), 0) == 37
    """  # noqa: E501
    rows, _ = collect(watch, code, path)
    seen = list(
        zip(
            rows["kind"].tolist(), rows["offset"].tolist(), rows["requested"].tolist(),
            rows["result"].tolist(), strict=True,
        )
    )  # fmt: skip
    assert seen == [
        (OpKind.PREAD64, 70_000, 4096, 1),
        (OpKind.PREAD64, 70_001, 4096, 0),
        (OpKind.WRITE, 70_001, 11, 11),
        (OpKind.WRITE, 70_012, 13, 13),
        (OpKind.PREAD64, 0, 17, -errno.EBADF),
        (OpKind.WRITE, 0, 1, -errno.EBADF),
        (OpKind.READ, 0, 29, 29),
        (OpKind.READ, 29, 31, 31),
        (OpKind.PREADV2, 60, 37, 37),
    ]


def test_pipes_and_sockets_have_no_rows() -> None:
    code = """
    import os, socket
    reader, writer = os.pipe()
    a, b = socket.socketpair()
    for n in range(41):
        os.write(writer, b"x" * 3517); os.read(reader, 3517)
        os.write(a.fileno(), b"x" * 3517); os.read(b.fileno(), 3517)
    print(os.getpid())
    """
    with open_session(["ops"], Filters()) as session:
        tgid = int(run_python(code))
        rows = session.poll()["ops"]
    mine = rows[rows["tgid"] == tgid]
    assert len(mine) > 0  # Python reads its library
    assert 3517 not in mine["requested"]


FIO = {
    "libaio": (["--ioengine=libaio", "--iodepth=32"], OpKind.LIBAIO_READ, OpKind.LIBAIO_WRITE),
    "io_uring": (["--ioengine=io_uring", "--iodepth=32"], OpKind.URING_READ, OpKind.URING_WRITE),
    "vectored": (
        ["--ioengine=io_uring", "--iodepth=16", "--nonvectored=0"],
        OpKind.URING_READ,
        OpKind.URING_WRITE,
    ),
    "registered": (
        ["--ioengine=io_uring", "--iodepth=16", "--fixedbufs=1", "--registerfiles=1"],
        OpKind.URING_READ,
        OpKind.URING_WRITE,
    ),
    "sqpoll": (
        ["--ioengine=io_uring", "--iodepth=8", "--sqthread_poll=1"],
        OpKind.URING_READ,
        OpKind.URING_WRITE,
    ),
    "workers": (
        ["--ioengine=io_uring", "--iodepth=8", "--force_async=1"],
        OpKind.URING_READ,
        OpKind.URING_WRITE,
    ),
}


@pytest.mark.parametrize("name", FIO)
@pytest.mark.parametrize("direct", [0, 1])
@retry_unseen
def test_asynchronous_operations_are_counted_exactly(
    loop_fs: LoopFs, watch: Watch, name: str, direct: int
) -> None:
    path = loop_fs.file(size=16 << 20)
    options, reads, writes = FIO[name]
    watch.begin()
    lost = watch.session.losses()["ops"].lost
    job = run_fio(
        path, *options, f"--direct={direct}", "--rw=randrw", "--bs=8k", "--invalidate=1",
        "--number_ios=1201", "--io_size=1g",
    )  # fmt: skip
    subprocess.run(["sync"], check=True)
    collected = watch.end()
    rows = rows_of(collected["ops"], path)
    assert kinds_of(rows) == {reads, writes}
    for kind, part in ((reads, job["read"]), (writes, job["write"])):
        mine = rows[rows["kind"] == kind]
        assert len(mine) == part["total_ios"]
        assert mine["result"].sum() == mine["requested"].sum() == part["io_bytes"]
    assert len(rows) == 1201
    assert set(rows["direct"]) == {direct}
    assert not (rows["offset"] % 8192).any()
    assert U64_MAX not in rows["offset"]
    assert len(np.unique(rows["tgid"])) == 1
    assert watch.session.losses()["ops"].lost == lost


def test_a_killed_process_leaves_nothing_behind(loop_fs: LoopFs) -> None:
    path = loop_fs.file(size=1 << 20)
    endless = "import os, sys\nfd = os.open(sys.argv[1], 0)\nwhile 1: os.pread(fd, 4096, 0)"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", endless, str(path)])
    try:
        filters = Filters(tgids=(process.pid,), root=str(loop_fs.mountpoint))
        with open_session(["ops"], filters) as session:
            time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
            rows = session.poll()["ops"]
            assert session.in_flight()["ops"] == 0
    finally:
        process.kill()
        process.wait()
    assert len(rows) > 0


def test_a_call_in_flight_when_collection_stops_is_counted_not_invented(loop_fs: LoopFs) -> None:
    fifo_like = Path("/sys/fs/cgroup/blkio")
    if not (fifo_like / "blkio.throttle.read_bps_device").exists():
        pytest.skip("needs the blkio controller of cgroup v1")
    path = loop_fs.file(size=4 << 20)
    group = fifo_like / f"kvprobe-slow-{os.getpid()}"
    group.mkdir()
    code = """
    import mmap, os, sys
    open(sys.argv[2], "w").write("0")
    fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    os.preadv(fd, [mmap.mmap(-1, 1 << 20)], 0)
    """
    try:
        rule = group / "blkio.throttle.read_bps_device"
        rule.write_text(f"{loop_fs.major_minor} 100000")
        with open_session(["ops"], Filters(root=str(loop_fs.mountpoint))) as session:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), str(path),
                 str(group / "cgroup.procs")]
            )  # fmt: skip
            deadline = time.monotonic() + 30
            while session.in_flight()["ops"] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            rows, in_flight = session.poll()["ops"], session.in_flight()["ops"]
        rule.write_text(f"{loop_fs.major_minor} 0")
        process.wait(timeout=30)
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    assert in_flight >= 1  # others on the machine may have calls open, too
    assert len(rows) == 0
