"""The scratch file system and the rate limit leave nothing behind, whatever ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.workload import scratch, throttle
from kvprobe.workload.scratch import PREFIX, Scratch, reclaim, scratch_filesystem
from kvprobe.workload.throttle import Limits, find_controller, set_limits

HOLD = """
import sys, time
from kvprobe.workload.scratch import scratch_filesystem
with scratch_filesystem(64 << 20, sys.argv[1]) as made:
    print(made.root, made.name, flush=True)
    time.sleep(60)
"""


def mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def attached(name: str) -> bool:
    return Path(f"/sys/block/{name}/loop/backing_file").exists()


@pytest.mark.root
def test_a_file_system_of_its_own_and_nothing_left(tmp_path: Path) -> None:
    with scratch_filesystem(64 << 20, str(tmp_path)) as made:
        assert made.name and made.device is not None and made.why == ""
        major, minor = Path(f"/sys/block/{made.name}/dev").read_text().strip().split(":")
        assert made.device == int(major) << 20 | int(minor)
        assert f"/dev/{made.name} {made.root} ext4" in mounts()
        room = os.statvfs(made.root)
        assert 40 << 20 < room.f_blocks * room.f_frsize < 64 << 20
        Path(made.root, "file").write_bytes(bytes(1 << 20))
        held = subprocess.Popen(["sleep", "0.3"], cwd=made.root)  # still there when we leave
    held.wait()
    assert str(tmp_path) not in mounts()
    assert list(tmp_path.iterdir()) == []
    assert not attached(made.name)


@pytest.mark.root
def test_an_error_inside_cleans_up_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_filesystem(64 << 20, str(tmp_path)):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in mounts()


def start(tmp_path: Path) -> tuple[subprocess.Popen[str], str, str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    root, name = child.stdout.readline().split()
    assert root in mounts() and attached(name)
    return child, root, name


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    child, root, name = start(tmp_path)
    child.send_signal(number)
    child.communicate()
    assert child.returncode != 0
    assert root not in mounts() and not attached(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_what_a_killed_process_left_is_reclaimed(tmp_path: Path) -> None:
    child, root, name = start(tmp_path)
    child.kill()
    child.communicate()
    assert root in mounts()
    reclaim()
    assert root not in mounts() and not attached(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_living_process_keeps_its_own(tmp_path: Path) -> None:
    with scratch_filesystem(64 << 20, str(tmp_path)) as made:
        reclaim()
        assert made.root in mounts()


@pytest.mark.parametrize("broken", ["no root", "no losetup", "no mkfs"])
def test_without_a_device_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    real = scratch._run

    def failing(*command: str) -> str:
        if command[0] == ("losetup" if broken == "no losetup" else "mkfs.ext4"):
            return real("false")
        return real(*command)

    if broken == "no root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif os.geteuid() == 0:
        monkeypatch.setattr(scratch, "_run", failing)
    with scratch_filesystem(64 << 20, str(tmp_path)) as made:
        assert (made.name, made.device) == (None, None)
        assert made.why
        Path(made.root, "file").write_bytes(b"works")
        assert Path(made.root).parent.name.startswith(PREFIX)
    assert list(tmp_path.iterdir()) == []
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [path for path in backing if path.startswith(str(tmp_path))]


READER = """
import os, mmap, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
block = mmap.mmap(-1, 1 << 18)
sys.stdin.readline()
start = time.monotonic()
total = sum(os.preadv(fd, [block], at << 18) for at in range(int(sys.argv[2])))
print(total, time.monotonic() - start)
"""


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Callable[[str, int], subprocess.Popen[str]]]:
    """Starts readers in a control group of their own; they read when told to."""
    home = find_controller()[0] / f"kvprobe-test-home-{os.getpid()}"
    home.mkdir()
    children = []

    def start_reader(path: str, blocks: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", READER, path, str(blocks)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        (home / "cgroup.procs").write_text(str(child.pid))
        return child

    yield start_reader
    for child in children:
        child.kill()
        child.communicate()
    home.rmdir()


def group_of(child: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{child.pid}/cgroup").read_text()


@pytest.mark.root
def test_a_rate_limit_holds_and_is_lifted(
    device: Scratch, readers: Callable[[str, int], subprocess.Popen[str]]
) -> None:
    rate = 7 << 20
    path = Path(device.root, "limited")
    path.write_bytes(os.urandom(16 << 20))
    os.sync()
    limited, other = readers(str(path), 37), readers(str(path), 1)
    home = group_of(limited)
    assert device.device is not None
    with throttle.throttle(device.device, Limits(read_bytes_per_s=rate), [limited.pid]) as group:
        assert group_of(limited) != home
        read, seconds = limited.communicate("go\n")[0].split()
        assert int(read) == 37 << 18
        assert 0.9 < int(read) / float(seconds) / rate < 1.1
        group.add(other.pid)
        assert group_of(other) != home
        folder = group._folder
    assert group_of(other) == home, "given back"
    assert not folder.exists()
    path.unlink()


@pytest.mark.root
def test_what_cannot_be_limited_is_one_line() -> None:
    nowhere = throttle.throttle(4095 << 20 | 77, Limits(read_bytes_per_s=1))
    with pytest.raises(KvprobeError, match="cannot limit device"), nowhere:
        pass
    with scratch_filesystem(64 << 20) as made:
        assert made.device is not None
        nobody = throttle.throttle(made.device, Limits(), [4194305])
        with pytest.raises(KvprobeError, match="process 4194305"), nobody:
            pass
    parent, _ = find_controller()
    assert not list(parent.glob(f"kvprobe-throttle-{os.getpid()}-*"))


def test_controllers_are_found_where_they_are_mounted(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text("tmpfs / tmpfs rw 0 0\ncgroup /cg/blkio cgroup rw,relatime,blkio 0 0\n")
    assert find_controller(str(table)) == (Path("/cg/blkio"), 1)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    table.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert find_controller(str(table)) == (tmp_path, 2)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu iolatency\n")
    with pytest.raises(KvprobeError, match="no block I/O controller"):
        find_controller(str(table))


def test_what_is_written_to_either_kind_of_group(tmp_path: Path) -> None:
    device = 259 << 20 | 3
    limits = Limits(read_bytes_per_s=1009, write_ops_per_s=13)
    set_limits(tmp_path, 2, device, limits)
    assert (tmp_path / "io.max").read_text() == "259:3 rbps=1009 wiops=13"
    set_limits(tmp_path, 1, device, limits)
    assert (tmp_path / "blkio.throttle.read_bps_device").read_text() == "259:3 1009"
    assert (tmp_path / "blkio.throttle.write_iops_device").read_text() == "259:3 13"
    assert len(list(tmp_path.iterdir())) == 3


def test_time_is_not_wasted_on_making_it(tmp_path: Path) -> None:
    begun = time.monotonic()
    with scratch_filesystem(1 << 30, str(tmp_path)):
        assert time.monotonic() - begun < 10
