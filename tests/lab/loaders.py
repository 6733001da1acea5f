"""The guest's side of the loader test: known work, seen by both loaders at once.

What happened is left as numbers in `loaders.json`; `test_loaders_in_guests.py` says what they
must be. No pytest here: importing it over the shared file tree takes longer than the work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe import schema
from kvprobe.bpf.roots import kernel_device
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters, Rows
from tests.lab import functions
from tests.lab.case import Backing, Topology
from tests.lab.stand import MOUNT, Stand, stand

LOADERS = ("core", "bcc")
DISK = Topology(file_system="ext4", backing=Backing(memory_backed=True, size_mib=256))
FILE_BYTES = 8 << 20

CALLS = """
import mmap, os, sys
path, new = sys.argv[1:]
buffer = mmap.mmap(-1, 28672)
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
for n in range(101):
    os.preadv(fd, [buffer], n * 28672)
for n in range(37):
    os.pwritev(fd, [memoryview(buffer)[:8192]], n * 16384)
os.close(fd)
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for n in range(53):
    os.pread(fd, 4096, 4194304 + n * 40960)
os.readv(fd, [bytearray(1009), bytearray(3001)])
os.close(fd)
fd = os.open(new + ".tmp", os.O_CREAT | os.O_WRONLY)
os.pwrite(fd, bytes(65536), 0)
os.fsync(fd)
os.close(fd)
os.rename(new + ".tmp", new)
for n in range(11):
    os.access(new, os.R_OK)
for n in range(7):
    os.path.exists(path + ".none")
"""
RAW = """
import mmap, os, sys
buffer = mmap.mmap(-1, 8192)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
for n in range(17):
    os.preadv(fd, [buffer], 67108864 + n * 8192)
"""


def run_loaders(folder: Path) -> None:
    """Do the work on a disk with a file system; leave the numbers in the folder.

    Raises:
        Exception: whatever went wrong; nothing of it is expected.
    """
    with stand(DISK) as built:
        device = kernel_device(os.stat(f"/dev/{built.disk}").st_rdev)
        facts = {"files": _files(built, device), "raw": _raw(built, device)}
    facts["functions"] = functions.sums()
    (folder / "loaders.json").write_text(json.dumps(facts, indent=1))


def _files(built: Stand, device: int) -> dict[str, Any]:
    """Reads and writes of files below a root, through every way in; both loaders attached."""
    path, new = MOUNT / "file", MOUNT / "new"
    path.write_bytes(os.urandom(FILE_BYTES))
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    filters = Filters(root=str(MOUNT), device=device)
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(open_session(None, filters, name)) for name in LOADERS
        }
        for session in sessions.values():
            session.poll()
            session.aggregates()
        before = built.counts()[built.disk]
        pid = _python(CALLS, path, new)
        _fio(path, "libaio", "12k", 83)
        _fio(path, "io_uring", "20k", 59)
        rows = {name: _drained(session) for name, session in sessions.items()}
        after, new_inode = built.counts()[built.disk], new.stat().st_ino
        aggregates = {name: session.aggregates() for name, session in sessions.items()}
    return {
        "loaders": {name: session.loader for name, session in sessions.items()},
        "attached": sessions["core"].attached,
        "differences": _differences(*rows.values()),
        "counted": {key: after[key] - before[key] for key in after},
        "histogram": {name: _histogram(found, device) for name, found in aggregates.items()},
        "block": _block(rows["core"]["block"], path, pid),
        "written_bytes": _written_bytes(rows["core"]["block"], new_inode),
        "ops": _by_kind(rows["core"]["ops"], schema.OpKind, "result"),
        "lookups": _by_kind(rows["core"]["lookups"], schema.LookupKind),
        "lost": {name: session.losses()["block"].lost for name, session in sessions.items()},
    }


def _raw(built: Stand, device: int) -> dict[str, Any]:
    """Direct reads of the disk itself: one after another, and asynchronous."""
    node = f"/dev/{built.disk}"
    with open_session(["block"], Filters(device=device)) as session:
        pid = _python(RAW, node)
        _fio(Path(node), "libaio", "12k", 19)
        rows = _drained(session)["block"]
    rows = rows[rows["op"] == 0]
    alone = rows[(rows["tgid"] == pid) & (rows["bytes"] == 8192)]
    asynchronous = rows[rows["bytes"] == 12288]
    return {
        "alone": {"rows": len(alone), "threads": sorted(set((alone["tid"] - pid).tolist()))},
        "asynchronous": {
            "rows": len(asynchronous),
            "methods": sorted(set(asynchronous["method"].tolist())),
            "inodes": sorted(set(asynchronous["inode"].tolist())),
            "inode": os.stat(node).st_ino,
        },
    }


def _python(code: str, *arguments: object) -> int:
    """Run code in a process of its own; returns its process id."""
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command)
    if process.wait(60):
        raise RuntimeError(f"the work failed: {process.returncode}")
    return process.pid


def _fio(path: Path, engine: str, size: str, count: int) -> None:
    command = [
        "fio", "--name=lab", f"--filename={path}", "--rw=randread", "--direct=1", f"--bs={size}",
        f"--ioengine={engine}", "--iodepth=5", f"--number_ios={count}", "--size=7m",
        "--allow_file_create=0",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _drained(session: Session) -> dict[str, Rows]:
    """Everything that the finished work has caused."""
    parts = []
    for _ in range(40):
        time.sleep(0.05)
        parts.append(session.poll())
        if not session.in_flight().get("block"):
            break
    parts.append(session.poll())
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _differences(core: dict[str, Rows], bcc: dict[str, Rows]) -> dict[str, Any]:
    """Per table, how many rows there are, and whether they differ in more than their times."""
    found = {}
    for table, rows in core.items():
        names = rows.dtype.names or ()
        plain = [name for name in names if not name.endswith("_ns") and name != "request"]
        one, other = (sorted(part[table][plain].tolist()) for part in (core, bcc))
        found[table] = {"rows": len(one), "different": one != other}
    return found


def _histogram(aggregates: dict[str, Rows], device: int) -> dict[str, int]:
    rows = aggregates["histogram"]
    rows = rows[rows["device"] == device]
    reads = rows["direction"] == 0
    return {
        "read": int(rows["requests"][reads].sum()),
        "read_bytes": int(rows["bytes"][reads].sum()),
        "write": int(rows["requests"][~reads].sum()),
        "write_bytes": int(rows["bytes"][~reads].sum()),
    }


def _block(rows: Rows, path: Path, pid: int) -> dict[str, Any]:
    """Requests of the file by operation and method, and whether their other columns fit."""
    status = path.stat()
    mine = rows[(rows["inode"] == status.st_ino) & (rows["op"] <= 1)]
    kinds: dict[str, dict[str, int]] = {}
    for op, method, size in sorted(set(mine[["op", "method", "bytes"]].tolist())):
        same = mine[(mine["op"] == op) & (mine["method"] == method) & (mine["bytes"] == size)]
        key = f"{('read', 'write')[op]} {schema.BlockMethod(method).name} {size}"
        kinds[key] = {"rows": len(same), "by_us": int((same["tid"] == pid).sum())}
    queued, issued, done = (
        mine[name].astype(np.int64) for name in ("queued_ns", "issued_ns", "done_ns")
    )
    return {
        "kinds": kinds,
        "in_order": bool(((queued > 0) & (queued <= issued) & (issued <= done)).all()),
        "offsets": len(set(mine[mine["bytes"] == 28672]["offset"].tolist())),
        "fs_device": sorted(set(mine["fs_device"].tolist())) == [kernel_device(status.st_dev)],
    }


def _written_bytes(rows: Rows, inode: int) -> int:
    """What went to the disk of a file that was written through the page cache."""
    pages = (rows["op"] == 1) & (rows["method"] == schema.BlockMethod.PAGE)
    return int(rows["bytes"][pages & (rows["inode"] == inode)].sum())


def _by_kind(rows: Rows, kinds: type[Any], column: str = "") -> dict[str, list[int]]:
    """Rows, and the sum of a column, by the name of their kind."""
    return {
        kinds(kind).name: [
            int((rows["kind"] == kind).sum()),
            int(rows[column][rows["kind"] == kind].sum()) if column else 0,
        ]
        for kind in sorted(set(rows["kind"].tolist()))
    }
