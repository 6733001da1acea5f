"""Block rows against what a workload is known to have done, and against /proc/diskstats."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvprobe.bpf.roots import kernel_device
from kvprobe.bpf.session import open_session
from kvprobe.model import Filters
from kvprobe.schema import BlockMethod

from .conftest import MIB, LoopFs, Watch, drain, retry_unseen, rows_of, run_fio, run_python

pytestmark = pytest.mark.root

DIRECT_READS = """
import mmap, os, sys
path, count, size, step = sys.argv[1], *map(int, sys.argv[2:])
fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, size)
for n in range(count):
    assert os.preadv(fd, [buffer], n * step) == size
print(os.getpid())
"""

PAGE_READS = """
import os, sys
path, count, step = sys.argv[1], *map(int, sys.argv[2:])
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for n in range(count):
    assert len(os.pread(fd, 4096, n * step)) == 4096
"""

BUFFERED_WRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
start = int(sys.argv[4]) if len(sys.argv) > 4 else 0
for n in range(int(sys.argv[2])):
    os.pwrite(fd, os.urandom(4096), start + n * 3 * 4096)
if sys.argv[3] == "fsync":
    os.fsync(fd)
"""


def sync() -> None:
    """In another process: what kvprobe itself writes is not traced."""
    subprocess.run(["sync"], check=True)


@retry_unseen
def test_each_direct_read_is_one_row_that_names_its_file_thread_and_offset(
    loop_fs: LoopFs,
    watch: Watch,
) -> None:
    path = loop_fs.file()
    watch.begin()
    tid = int(run_python(DIRECT_READS, path, 509, 4096, 12288))
    rows = watch.end()["block"]
    assert len(rows) == 509
    assert len(rows_of(rows, path)) == 509
    assert rows["offset"].tolist() == [n * 12288 for n in range(509)]
    assert set(rows["tgid"]) == set(rows["tid"]) == {tid}
    assert set(rows["method"]) == {BlockMethod.DIRECT}
    assert set(rows["bytes"]) == {4096}
    assert set(rows["device"]) == {loop_fs.dev_t}
    assert set(rows["hw_queue"]) == {0}
    for column in ("op", "status", "held"):
        assert not rows[column].any(), column
    assert (rows["queued_ns"] <= rows["issued_ns"]).all()
    assert (rows["issued_ns"] <= rows["done_ns"]).all()
    assert (rows["queued_ns"] > 0).all()


@retry_unseen
def test_every_request_of_a_large_read_carries_the_offset_of_that_read(
    loop_fs: LoopFs, watch: Watch
) -> None:
    path = loop_fs.file()
    watch.begin()
    run_python(DIRECT_READS, path, 3, 7 * MIB, 7 * MIB)
    rows = rows_of(watch.end()["block"], path)
    assert len(rows) > 3  # the device takes less than 7 MiB at a time
    assert set(rows["offset"]) == {0, 7 * MIB, 14 * MIB}
    for offset in (0, 7 * MIB, 14 * MIB):
        assert rows["bytes"][rows["offset"] == offset].sum() == 7 * MIB
    starts = np.sort(rows["sector"] * 512)
    assert len(np.unique(starts)) == len(rows)


@pytest.mark.parametrize("engine", ["io_uring", "libaio"])
@retry_unseen
def test_block_rows_of_asynchronous_reads_carry_the_offsets_of_the_operations(
    loop_fs: LoopFs, watch: Watch, engine: str
) -> None:
    path = loop_fs.file()
    watch.begin()
    run_fio(
        path, f"--ioengine={engine}", "--direct=1", "--rw=randread", "--bs=8k",
        "--iodepth=16", "--number_ios=1013", "--io_size=1g",
    )  # fmt: skip
    rows = watch.end()
    block, ops = rows_of(rows["block"], path), rows_of(rows["ops"], path)
    assert len(ops) == len(block) == 1013
    assert np.sort(block["offset"]).tolist() == np.sort(ops["offset"]).tolist()
    assert set(block["tid"]) == set(ops["tid"])


@retry_unseen
def test_a_buffered_read_is_placed_by_its_page(loop_fs: LoopFs, watch: Watch) -> None:
    path = loop_fs.file()
    watch.begin()
    run_python(PAGE_READS, path, 251, 3 * 4096)
    rows = rows_of(watch.end()["block"], path)
    assert set(rows["method"]) == {BlockMethod.PAGE}
    assert np.sort(rows["offset"]).tolist() == [n * 3 * 4096 for n in range(251)]
    assert rows["bytes"].sum() == 251 * 4096


@contextlib.contextmanager
def queue_settings(loop_fs: LoopFs, **settings: int) -> Iterator[None]:
    queue = Path("/sys/block") / Path(loop_fs.device).name / "queue"
    before = {name: (queue / name).read_text() for name in settings}
    try:
        for name, value in settings.items():
            (queue / name).write_text(str(value))
        yield
    finally:
        for name, text in before.items():
            (queue / name).write_text(text)


@pytest.mark.parametrize(("read_ahead_kib", "largest_kib"), [(128, 1280), (2048, 24)])
@retry_unseen
def test_sequential_buffered_reads_cover_the_file_without_overlap(
    loop_fs: LoopFs, watch: Watch, read_ahead_kib: int, largest_kib: int
) -> None:
    """Also where the block layer cuts bios in the middle of a run of pages."""
    path = loop_fs.file(size=8 * MIB)
    with queue_settings(loop_fs, read_ahead_kb=read_ahead_kib, max_sectors_kb=largest_kib):
        watch.begin()
        run_python("import sys; open(sys.argv[1], 'rb').read()", path)
        rows = rows_of(watch.end()["block"], path)
    order = np.argsort(rows["offset"])
    start, size = rows["offset"][order], rows["bytes"][order]
    assert start[0] == 0
    assert (start[1:] == start[:-1] + size[:-1]).all()
    assert size.sum() == 8 * MIB
    assert size.max() <= largest_kib << 10


@pytest.mark.parametrize("cached", [False, True])
@retry_unseen
def test_write_back_belongs_to_the_file_whoever_submits_it(
    loop_fs: LoopFs, watch: Watch, cached: bool
) -> None:
    """Cached: a page that is written lies within a large folio that was read ahead."""
    path = loop_fs.file()
    if cached:
        with queue_settings(loop_fs, read_ahead_kb=2048):
            run_python("import sys; open(sys.argv[1], 'rb').read()", path)
    watch.begin()
    start = 16 * MIB if cached else 0  # read-ahead begins with single pages
    run_python(BUFFERED_WRITE, path, 127, "no", start)
    sync()  # the kernel's flusher submits
    rows = rows_of(watch.end()["block"], path)
    assert set(rows["op"]) == {1}
    assert set(rows["method"]) == {BlockMethod.PAGE}
    assert rows["bytes"].sum() == 127 * 4096
    assert np.sort(rows["offset"]).tolist() == [start + n * 3 * 4096 for n in range(127)]


@retry_unseen
def test_bytes_equal_diskstats(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], Filters(device=loop_fs.dev_t)) as session:
        sync()
        drain(session)
        before = loop_fs.diskstats()
        run_fio(
            path, "--ioengine=libaio", "--direct=1", "--rw=randrw", "--bs=16k", "--iodepth=8",
            "--number_ios=1511", "--io_size=1g",
        )  # fmt: skip
        sync()
        rows = drain(session)["block"]
        after = loop_fs.diskstats()
    for op, count, size in ((0, "reads", "read_bytes"), (1, "writes", "written_bytes")):
        part = rows[rows["op"] == op]  # the kernel counts an empty flush as a write, too
        assert part["bytes"].sum() == after[size] - before[size]
        assert len(part) == after[count] - before[count]


@retry_unseen
def test_asynchronous_reads_of_a_raw_device_are_told_as_such(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8 * MIB))
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        number = kernel_device(os.stat(device).st_rdev)
        with open_session(["block"], Filters(device=number)) as session:
            run_fio(
                Path(device), "--ioengine=libaio", "--direct=1", "--rw=randread", "--bs=4k",
                "--iodepth=4", "--number_ios=307", "--io_size=1g", "--size=4m",
            )  # fmt: skip
            rows = rows_of(drain(session)["block"], Path(device))
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
    assert set(rows["method"]) == {BlockMethod.RAW_DEVICE}
    assert len(rows) == 307


@retry_unseen
def test_a_request_that_completes_in_two_steps_is_one_row_with_its_status(
    loop_fs: LoopFs,
) -> None:
    """A loop device whose file ends in the middle of a read completes the read in two steps."""
    image = loop_fs.mountpoint.parent / "memory" / "short"
    image.write_bytes(os.urandom(MIB))
    device = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", str(image)],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    try:
        os.truncate(image, MIB // 2 + 8192)
        number = kernel_device(os.stat(device).st_rdev)
        with open_session(["block"], Filters(device=number)) as session:
            subprocess.run(
                ["fio", "--name=job", f"--filename={device}", "--ioengine=libaio", "--direct=1",
                 "--rw=read", "--bs=64k", f"--offset={MIB // 2}", "--size=64k"],
                check=False, capture_output=True,
            )  # fmt: skip
            rows = drain(session)["block"]
            histogram = session.aggregates()["histogram"]
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
        image.unlink()
    (row,) = rows[rows["offset"] == MIB // 2]
    assert (row["sector"], row["bytes"]) == (MIB // 2 // 512, 65536)
    assert row["status"] == 10  # BLK_STS_IOERR
    assert histogram["bytes"][histogram["size_low_bytes"] == 65536].sum() == 65536


@pytest.mark.parametrize(("rule", "held"), [(1_000_000_000, 0), (4_000_000, 13)])
@retry_unseen
def test_held_says_that_the_throttle_let_go_late(
    loop_fs: LoopFs, watch: Watch, rule: int, held: int
) -> None:
    path = loop_fs.file()
    group = Path("/sys/fs/cgroup/blkio") / f"kvprobe-test-{os.getpid()}"
    if not group.parent.joinpath("blkio.throttle.read_bps_device").exists():
        pytest.skip("needs the blkio controller of cgroup v1")
    group.mkdir()
    try:
        group.joinpath("blkio.throttle.read_bps_device").write_text(f"{loop_fs.major_minor} {rule}")
        watch.begin()
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        run_python(join + DIRECT_READS, path, 13, MIB, MIB)
        rows = rows_of(watch.end()["block"], path)
    finally:
        group.rmdir()
    requests = rows["held"].reshape(-1)
    assert len(np.unique(rows["offset"])) == 13
    # The first megabyte may be within the allowance of the first time slice.
    late = np.unique(rows["offset"][requests == 1])
    assert len(late) in ({0} if held == 0 else {12, 13})
