"""The real ring buffer, written by the real kernel while it is being read."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvprobe.bpf.session import open_session
from kvprobe.model import Filters

from .conftest import Collected, LoopFs

pytestmark = pytest.mark.root

CALLS = 20011
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
for n in range(int(sys.argv[2])):
    os.pread(fd, 1, n)
"""


def test_every_row_arrives_intact_through_many_wraps_or_is_counted_as_lost(
    loop_fs: LoopFs,
) -> None:
    path = loop_fs.file(size=32768)
    command = [sys.executable, "-I", "-S", "-c", WRITER, str(path), str(CALLS)]
    rows = Collected()
    with open_session(["ops"], Filters(root=str(path.parent)), ring_bytes=65536) as session:
        writers = [subprocess.Popen(command) for _ in range(2)]
        while any(writer.poll() is None for writer in writers):
            rows.add(session.poll())
        rows.add(session.poll())
        loss = session.losses()["ops"]
    ops = rows["ops"]
    assert len(ops) * 64 > 4 * 65536  # the ring has wrapped
    assert len(ops) + loss.lost == 2 * CALLS
    assert loss.rows == len(ops)
    for writer in writers:
        offsets = ops["offset"][ops["tgid"] == writer.pid].astype(np.int64)
        assert (np.diff(offsets) > 0).all()
        assert loss.lost or offsets.tolist() == list(range(CALLS))
    assert set(ops["requested"]) == {1}
    assert set(ops["inode"]) == {path.stat().st_ino}
