"""Filters, losses, thinning and in-kernel aggregates: counts that must add up exactly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvprobe.bpf.aggregates import latency_edges
from kvprobe.bpf.session import open_session
from kvprobe.model import Filters

from .conftest import LoopFs, drain, retry_unseen, rows_of, run_fio, run_python
from .test_block_rows import BUFFERED_WRITE, DIRECT_READS

pytestmark = pytest.mark.root

READ_4K = ("--ioengine=libaio", "--direct=1", "--rw=randread", "--bs=4k", "--iodepth=16")
WAITS = """
import subprocess, sys
sys.stdin.readline()
sys.exit(subprocess.call(sys.argv[1:]))
"""


def waiting(*command: object) -> subprocess.Popen[str]:
    """A process that starts a child with that command as soon as it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WAITS, *map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def let_run(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


@retry_unseen
def test_a_process_filter_keeps_children_born_later_and_nobody_else(loop_fs: LoopFs) -> None:
    ours, other = loop_fs.file("ours"), loop_fs.file("other")
    process = waiting(sys.executable, "-I", "-S", "-c", DIRECT_READS, ours, 211, 4096, 8192)
    filters = Filters(tgids=(process.pid,), device=loop_fs.dev_t)
    with open_session(["block", "ops"], filters) as session:
        run_python(DIRECT_READS, other, 101, 4096, 8192)
        let_run(process)
        run_python(DIRECT_READS, other, 103, 4096, 8192)
        rows = drain(session)
    assert len(rows_of(rows["block"], ours)) == len(rows["block"]) == 211
    assert len(rows_of(rows["ops"], ours)) == 211
    assert len(rows_of(rows["ops"], other)) == 0
    assert process.pid not in rows["block"]["tgid"]


@retry_unseen
def test_a_process_filter_keeps_what_kernel_threads_write_for_the_process(loop_fs: LoopFs) -> None:
    ours, other = loop_fs.file("ours"), loop_fs.file("other")
    process = waiting(sys.executable, "-I", "-S", "-c", BUFFERED_WRITE, ours, 89, "no")
    filters = Filters(tgids=(process.pid,), device=loop_fs.dev_t)
    with open_session(["block", "ops"], filters) as session:
        run_python(BUFFERED_WRITE, other, 97, "no")
        let_run(process)
        subprocess.run(["sync"], check=True)
        rows = drain(session)["block"]
    assert rows_of(rows, ours)["bytes"].sum() == 89 * 4096
    assert len(rows_of(rows, other)) == 0


@retry_unseen
def test_a_root_filter_leaves_a_sibling_directory_out(loop_fs: LoopFs) -> None:
    inside, outside = loop_fs.file("kv/deep/er/data"), loop_fs.file("kv2/data")
    filters = replace(loop_fs.filters, root=str(loop_fs.mountpoint / "kv"))
    with open_session(["block", "ops"], filters) as session:
        run_python(DIRECT_READS, outside, 109, 4096, 8192)
        run_python(DIRECT_READS, inside, 113, 4096, 8192)
        run_python(BUFFERED_WRITE, inside, 61, "fsync")
        run_python(BUFFERED_WRITE, outside, 67, "fsync")
        rows = drain(session)
    block = rows["block"]
    assert len(rows_of(block, inside)) == len(block)
    assert (block["op"] == 0).sum() == 113
    assert block["bytes"][block["op"] == 1].sum() == 61 * 4096
    assert len(rows_of(rows["ops"], inside)) == len(rows["ops"]) == 113 + 61


def test_a_file_system_mounted_below_the_root_counts_as_inside(
    loop_fs: LoopFs, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "mounted").mkdir(parents=True)
    path = loop_fs.file("bound/data")
    subprocess.run(["mount", "--bind", str(path.parent), str(root / "mounted")], check=True)
    try:
        with open_session(["block", "ops"], Filters(root=str(root))) as session:
            run_python(DIRECT_READS, root / "mounted" / "data", 107, 4096, 8192)
            time.sleep(0.1)
            rows = session.poll()
    finally:
        subprocess.run(["umount", str(root / "mounted")], check=True)
    assert len(rows_of(rows["ops"], path)) == len(rows["ops"]) == 107
    assert set(rows["block"]["inode"]) == {path.stat().st_ino}


@retry_unseen
def test_a_device_filter_leaves_other_devices_out(loop_fs: LoopFs, tmp_path: Path) -> None:
    path, elsewhere = loop_fs.file(), tmp_path / "elsewhere"
    elsewhere.write_bytes(os.urandom(1 << 20))
    with open_session(["block"], Filters(device=loop_fs.dev_t)) as session:
        run_python("import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDWR))", elsewhere)
        run_python(DIRECT_READS, path, 127, 4096, 8192)
        rows = drain(session)["block"]
        aggregates = session.aggregates()
    assert set(rows["device"]) == {loop_fs.dev_t}
    assert (rows["op"] == 0).sum() == 127
    assert set(aggregates["histogram"]["device"]) == {loop_fs.dev_t}


@retry_unseen
def test_min_latency_keeps_slow_requests_only(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], loop_fs.filters) as session:
        run_python(DIRECT_READS, path, 401, 4096, 8192)
        rows = drain(session)["block"]
    edges = latency_edges()
    middle = int(edges[np.searchsorted(edges, np.median(rows["done_ns"] - rows["queued_ns"]))])
    with open_session(["block"], replace(loop_fs.filters, min_latency_ns=middle)) as session:
        run_python(DIRECT_READS, path, 401, 4096, 8192)
        slow = drain(session)["block"]
        everything = session.aggregates()["histogram"]
    assert everything["requests"].sum() == 401
    assert len(slow) == everything["requests"][everything["latency_low_ns"] >= middle].sum()
    assert (slow["done_ns"] - slow["queued_ns"] >= middle).all()


@retry_unseen
def test_rows_lost_to_a_full_ring_are_counted_and_the_aggregates_stay_complete(
    loop_fs: LoopFs,
) -> None:
    path = loop_fs.file()
    with open_session(["block"], loop_fs.filters, ring_bytes=4096) as session:
        job = run_fio(path, *READ_4K, "--number_ios=5003", "--io_size=1g")
        rows = drain(session)["block"]
        loss = session.losses()["block"]
        histogram = session.aggregates()["histogram"]
    reads = job["read"]
    assert reads["total_ios"] == 5003
    assert len(rows) == loss.rows == 4096 // (8 + rows.itemsize)  # a header before each
    assert loss.rows + loss.lost == 5003
    assert loss.thinned == 0
    assert histogram["requests"].sum() == 5003
    assert histogram["bytes"].sum() == reads["io_bytes"]


@retry_unseen
def test_thinned_rows_are_counted_and_thinning_can_change_while_running(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], replace(loop_fs.filters, keep_one_in=7)) as session:
        run_fio(path, *READ_4K, "--number_ios=4001", "--io_size=1g")
        thinned = drain(session)["block"]
        loss = session.losses()["block"]
        session.set_keep_one_in(1)
        run_fio(path, *READ_4K, "--number_ios=503", "--io_size=1g")
        whole = drain(session)["block"]
        histogram = session.aggregates()["histogram"]
    assert len(thinned) + loss.thinned == 4001
    assert loss.lost == 0
    assert 4001 / 14 < len(thinned) < 4001 / 4
    assert len(whole) == 503
    assert histogram["requests"].sum() == 4001 + 503


@retry_unseen
def test_time_at_depth_sums_to_the_interval_and_reaches_the_depth_asked_for(
    loop_fs: LoopFs,
) -> None:
    path = loop_fs.file()
    with open_session(["block"], loop_fs.filters) as session:
        session.aggregates()
        run_fio(path, *READ_4K, "--number_ios=7001", "--io_size=1g")
        rows = drain(session)["block"]
        first = session.aggregates()["depth"]
        time.sleep(0.05)
        second = session.aggregates()["depth"]
    assert (first["end_ns"].max()) == second["start_ns"].min()
    for part in (first, second):
        for direction in (0, 1):
            mine = part[part["direction"] == direction]
            length = int(mine["end_ns"][0] - mine["start_ns"][0])
            assert abs(int(mine["time_ns"].sum()) - length) <= length * 0.01
    reads = first[first["direction"] == 0]
    assert reads["depth"].max() <= 17
    # Little's law on the exact rows: the sum of latencies is the integral of the depth.
    waited = int((rows["done_ns"] - rows["queued_ns"]).sum())
    assert abs(int((reads["depth"] * reads["time_ns"]).sum()) - waited) < waited * 0.01
    assert set(second["depth"]) == {0}


@retry_unseen
def test_every_row_lies_in_a_bucket_of_the_histogram(loop_fs: LoopFs) -> None:
    path = loop_fs.file()
    with open_session(["block"], Filters(device=loop_fs.dev_t)) as session:
        run_fio(
            path, "--ioengine=libaio", "--direct=1", "--rw=randrw", "--bsrange=4k-256k",
            "--iodepth=4", "--number_ios=2003", "--io_size=1g",
        )  # fmt: skip
        subprocess.run(["sync"], check=True)
        rows = drain(session)["block"]
        histogram = session.aggregates()["histogram"]
    rows = rows[rows["op"] <= 1]
    latency = (rows["done_ns"] - rows["queued_ns"]).astype(np.int64)
    assert len(histogram) > 10
    for bucket in histogram:
        low = int(bucket["size_low_bytes"])
        inside = (
            (rows["op"] == bucket["direction"])
            & (rows["bytes"] >= low)
            & (rows["bytes"] < (2 * low or 512))
            & (latency >= bucket["latency_low_ns"])
            & (latency < bucket["latency_high_ns"])
        )
        assert inside.sum() == bucket["requests"]
        assert rows["bytes"][inside].sum() == bucket["bytes"]
