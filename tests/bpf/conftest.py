"""A file system on a loop device, workloads in child processes, rows collected from a session."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import pytest

from kvprobe import schema
from kvprobe.bpf.roots import kernel_device
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters, Rows

P = ParamSpec("P")
MIB = 1 << 20
FILE_BYTES = 24 * MIB


@dataclass(frozen=True)
class LoopFs:
    """An ext4 on a loop device of its own, that nothing else uses."""

    mountpoint: Path
    device: str
    dev_t: int
    """The kernel's number of the loop device, which is also that of the file system."""

    @property
    def major_minor(self) -> str:
        return f"{self.dev_t >> 20}:{self.dev_t & 0xFFFFF}"

    @property
    def filters(self) -> Filters:
        """Everything on this file system and nothing else."""
        return Filters(root=str(self.mountpoint), device=self.dev_t)

    def file(self, name: str = "data", size: int = FILE_BYTES) -> Path:
        """A file of random bytes, on the device and not in the page cache."""
        path = self.mountpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.write(os.urandom(size))
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return path

    def diskstats(self) -> dict[str, int]:
        """Read and write counters of the device: completed requests, bytes."""
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            if fields[2] == Path(self.device).name:
                return {
                    "reads": int(fields[3]),
                    "read_bytes": 512 * int(fields[5]),
                    "writes": int(fields[7]),
                    "written_bytes": 512 * int(fields[9]),
                }
        raise LookupError(self.device)


def _run(*command: str) -> str:
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return ran.stdout.strip()


@pytest.fixture(scope="session")
def loop_fs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopFs]:
    """One for all tests: each uses files of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run the tests with sudo")
    folder = tmp_path_factory.mktemp("kvprobe-loop")
    mountpoint = folder / "mnt"
    mountpoint.mkdir()
    memory = folder / "memory"
    memory.mkdir()
    device = ""
    _run("mount", "-t", "tmpfs", "-o", "size=600m", "kvprobe-test", str(memory))
    try:
        image = memory / "image"
        with image.open("wb") as out:
            out.truncate(512 * MIB)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", str(image))
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
        _run("mount", "-o", "noatime", device, str(mountpoint))
        yield LoopFs(mountpoint, device, kernel_device(os.stat(device).st_rdev))
    finally:
        subprocess.run(["umount", str(mountpoint)], check=False, capture_output=True)
        if device:
            subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)
        subprocess.run(["umount", str(memory)], check=False, capture_output=True)


def run_python(code: str, *arguments: object, **options: Any) -> str:
    """Run Python code in a process of its own; returns what it printed.

    kvprobe never traces itself, so nothing that a test does in its own process would be seen.
    """
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *map(str, arguments)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, **options)
    return str(ran.stdout).strip()


def run_fio(path: Path, *options: str) -> dict[str, Any]:
    """Run one fio job on a file and return its JSON report of that job."""
    base = ["fio", "--name=job", f"--filename={path}", "--size=16m", "--output-format=json"]
    report = json.loads(_run(*base, *options))
    job: dict[str, Any] = report["jobs"][0]
    assert job["error"] == 0
    return job


class Collected(dict[str, Rows]):
    """Rows of each table, in the order of arrival."""

    def add(self, rows: dict[str, Rows]) -> None:
        for name, part in rows.items():
            self[name] = np.concatenate([self[name], part]) if name in self else part


class UnseenError(AssertionError):
    """The kernel ran no BPF program for some completion; the session counted that."""


def retry_unseen(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test again if completions were not shown to BPF, four times at most.

    The kernel of some sandboxes runs no BPF program while a process of the sandbox itself is
    current, and a completion may interrupt just that one. kvprobe notices: the request stays in
    its slot. A fault of kvprobe that leaves requests behind would do so every time.
    """

    @functools.wraps(test)
    def again(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(4):
            try:
                return test(*args, **kwargs)
            except UnseenError:
                continue
        return test(*args, **kwargs)

    return again


def drain(session: Session, unseen_before: int = 0) -> Collected:
    """Everything that a finished workload has caused, late completions included.

    Raises:
        UnseenError: requests never completed as far as BPF could see. Sessions need the device
            filter, else other people's requests are waited for, too.
    """
    collected = Collected()
    for _ in range(20):
        time.sleep(0.02)
        collected.add(session.poll())
        if not session.in_flight().get("block"):
            break
    collected.add(session.poll())
    unseen = session.counter("block_unseen") - unseen_before
    if session.in_flight().get("block") or unseen:
        raise UnseenError(f"{session.in_flight()}, {unseen} unseen")
    return collected


@dataclass
class Watch:
    """One session for the tests of a module: opening and closing take longer than the tests."""

    session: Session
    _unseen: int = 0

    def begin(self) -> None:
        """Forget what was before."""
        with contextlib.suppress(UnseenError):
            drain(self.session)
        self._unseen = self.session.counter("block_unseen")

    def end(self) -> Collected:
        """The rows since ``begin``; see ``drain``."""
        return drain(self.session, self._unseen)


@pytest.fixture(scope="module")
def watch(loop_fs: LoopFs) -> Iterator[Watch]:
    """All probes on the loop device's file system, nothing else."""
    with open_session(None, loop_fs.filters) as session:
        yield Watch(session)


def rows_of(rows: Rows, path: Path) -> Rows:
    """The rows of one file: inode and device agree with what stat() says."""
    status = path.stat()
    same = (rows["inode"] == status.st_ino) & (rows["fs_device"] == kernel_device(status.st_dev))
    found: Rows = rows[same]
    return found


def kinds_of(rows: Rows) -> set[schema.OpKind]:
    return {schema.OpKind(kind) for kind in rows["kind"].tolist()}
