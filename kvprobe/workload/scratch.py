"""A small file system on a loop device, made and removed again: for tests and the demo."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PREFIX = "kvprobe-scratch-"
_STOPPING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Scratch:
    """A folder to work in.

    ``name`` and ``device`` (dev_t) are of its own loop device, or None where it is a plain folder;
    ``why`` then says what prevented the device.
    """

    root: str
    name: str | None = None
    device: int | None = None
    direct_io: bool = False
    """Whether the loop device bypasses the page cache of the file system below it."""
    why: str = ""


class _Refused(Exception):
    """This machine does not let us make the device."""


@contextmanager
def scratch_filesystem(size_bytes: int = 2 << 30, where: str | None = None) -> Iterator[Scratch]:
    """An empty ext4 of ``size_bytes`` on a loop device over a sparse file below ``where``.

    The file is unlinked and the device set to clear itself as soon as it is mounted, so that even
    a killed process leaves one mount and nothing else; the next call removes that. Not root, or
    no loop device: a plain folder. Everything is removed on leaving, at exit and on SIGTERM.
    """
    reclaim()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    with _clean_up_on_every_exit(folder):
        mount = folder / "mnt"
        mount.mkdir()
        try:
            name, direct_io = _make(folder / "image", mount, size_bytes)
        except _Refused as refused:
            yield Scratch(str(mount), why=str(refused))
        else:
            yield Scratch(str(mount), name, kernel_device(mount), direct_io)


def kernel_device(path: Path | str) -> int:
    """The kernel's dev_t (major << 20 | minor) of the file system that ``path`` is on."""
    device = os.stat(path).st_dev
    return os.major(device) << 20 | os.minor(device)


def reclaim() -> None:
    """Remove what killed processes left mounted."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        folder = Path(line.split(" ")[1]).parent
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if folder.name.startswith(PREFIX) and pid.isdecimal() and not _alive(int(pid)):
            _remove(folder)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _make(image: Path, mount: Path, size_bytes: int) -> tuple[str, bool]:
    """Make and mount the file system; returns the loop device's name and its direct flag."""
    if os.geteuid() != 0:
        raise _Refused("a loop device needs root")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    device = ""
    try:
        device = _run("losetup", "--find", "--show", "--nooverlap", str(image))
        with suppress(_Refused):  # a backing file system may lack direct I/O
            _run("losetup", "--direct-io=on", device)
        _run(
            "mkfs.ext4", "-q", "-F", "-m", "0",
            "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", device,
        )  # fmt: skip
        _run("mount", "-t", "ext4", "-o", "noatime", device, str(mount))
    finally:
        if device:
            with suppress(_Refused):
                _run("losetup", "--detach", device)  # mounted: clears itself when unmounted
        image.unlink()
    name = Path(device).name
    return name, Path(f"/sys/block/{name}/loop/dio").read_text(encoding="ascii").strip() == "1"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise _Refused(f"{command[0]}: {said[-1] if said else 'failed'}") from None
    return done.stdout.strip()


@contextmanager
def _clean_up_on_every_exit(folder: Path) -> Iterator[None]:
    def remove() -> None:
        _remove(folder)

    atexit.register(remove)
    try:
        with _signals_exit():
            yield
    finally:
        with _signals_held():
            remove()
        atexit.unregister(remove)


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack where they would kill; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    replaced = [s for s in _STOPPING if signal.getsignal(s) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let a second Ctrl-C wait until the clean-up is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_STOPPING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove(folder: Path) -> None:
    mount = folder / "mnt"
    for _ in range(20):
        if not os.path.ismount(mount):
            break
        try:
            _run("umount", str(mount))
        except _Refused:
            time.sleep(0.1)  # a process that is just ending may still hold a file
    else:
        with suppress(_Refused):
            _run("umount", "--lazy", str(mount))
    shutil.rmtree(folder, ignore_errors=True)
