"""Both loaders, attached at once to the same events, must tell the same story.

Not a comparison of two runs: every event runs both programs, so rows have to be equal one by one,
and their times may differ only by what one program takes after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvprobe import schema
from kvprobe.bpf import bcc_loader
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters, Rows

from .conftest import MIB, Collected, LoopFs, drain, retry_unseen, run_fio, run_python

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        not (bcc_loader.DEBIAN_PACKAGES / "bcc").is_dir(), reason="python3-bpfcc is not installed"
    ),
]

LOADERS = ("core", "bcc")
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


@contextmanager
def both(filters: Filters) -> Iterator[dict[str, Session]]:
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(open_session(None, filters, name)) for name in LOADERS
        }
        for name, session in sessions.items():
            assert session.loader == name
            session.poll()  # files that were open before differ only in when they were looked at
        yield sessions


def collect(sessions: dict[str, Session]) -> dict[str, Collected]:
    return {name: drain(session) for name, session in sessions.items()}


def ordered(table: schema.Table, rows: Rows) -> tuple[list[tuple[object, ...]], Rows]:
    """Rows without their times, sorted, and the rows themselves in the same order."""
    untimed = [c.name for c in table.columns if not c.name.endswith("_ns")]
    keys = [tuple(row.tolist()) for row in rows[untimed]]
    order = sorted(range(len(rows)), key=lambda at: (keys[at], tuple(rows[at].tolist())))
    return [keys[at] for at in order], rows[order]


def assert_equal(found: dict[str, Collected], table: schema.Table, at_least: int) -> None:
    (core, core_rows), (bcc, bcc_rows) = (
        ordered(table, found[name][table.name]) for name in LOADERS
    )
    assert len(core) >= at_least
    assert core == bcc
    for column in table.columns:
        if column.name.endswith("_ns"):
            one, other = (r[column.name].astype(np.int64) for r in (core_rows, bcc_rows))
            assert ((one == 0) == (other == 0)).all(), column.name
            assert np.abs(one - other).max() < SLACK_NS, column.name


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


@retry_unseen
def test_rows_below_a_root(loop_fs: LoopFs) -> None:
    with both(loop_fs.filters) as sessions:
        work(loop_fs)
        check(collect(sessions))
        assert {name: session.losses() for name, session in sessions.items()} == {
            name: sessions["core"].losses() for name in LOADERS
        }


@retry_unseen
def test_rows_of_a_process_and_its_children(loop_fs: LoopFs) -> None:
    with both(Filters(tgids=(os.getpid(),), device=loop_fs.dev_t)) as sessions:
        work(loop_fs)
        check(collect(sessions))


@retry_unseen
def test_aggregates(loop_fs: LoopFs) -> None:
    """Depth and histogram count requests of the device; latencies may fall into the next bucket."""
    path = loop_fs.file("aggregates")
    with both(Filters(device=loop_fs.dev_t)) as sessions:
        for session in sessions.values():
            session.aggregates()
        run_fio(path, "--rw=randrw", "--bs=8k", "--direct=1", "--ioengine=libaio", "--iodepth=3")
        drained = collect(sessions)
        found = {name: session.aggregates() for name, session in sessions.items()}
    expected = 16 * MIB // 8192
    for name in LOADERS:
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
                for part in (found[loader]["histogram"] for loader in LOADERS)
            ]
            assert per_size[0] == per_size[1], column
        depth = found[name]["depth"]
        mine = depth[depth["device"] == loop_fs.dev_t]
        assert int(mine["depth"].max()) == int(found["core"]["depth"]["depth"].max())
    assert len(drained["core"]["block"]) == len(drained["bcc"]["block"])
