"""A rate limit below the file system, for some processes and one device: a known slow device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import ExitCode, KvprobeError

_numbers = itertools.count()


@dataclass(frozen=True)
class Limits:
    """Bytes and operations a second; None is no limit."""

    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    read_ops_per_s: int | None = None
    write_ops_per_s: int | None = None


_V1 = {
    "read_bytes_per_s": "blkio.throttle.read_bps_device",
    "write_bytes_per_s": "blkio.throttle.write_bps_device",
    "read_ops_per_s": "blkio.throttle.read_iops_device",
    "write_ops_per_s": "blkio.throttle.write_iops_device",
}
_V2 = {
    "read_bytes_per_s": "rbps",
    "write_bytes_per_s": "wbps",
    "read_ops_per_s": "riops",
    "write_ops_per_s": "wiops",
}


class Throttle:
    """A control group whose members are limited on one device."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the group; what it held at the end goes back whence it came."""
        self._folder = folder
        self._home: dict[int, Path] = {}

    def add(self, pid: int) -> None:
        """Limit a process, its threads and the children it starts from now on.

        Raises:
            KvprobeError: there is no such process, or it may not be moved.
        """
        try:
            self._home[pid] = _group_of(pid, self._folder.parent)
            _write(self._folder / "cgroup.procs", str(pid))
        except OSError as error:
            raise KvprobeError(
                f"cannot limit process {pid}: {error.strerror}", "is it running?"
            ) from None

    def remove(self) -> None:
        """Give all members back to where they were and remove the group."""
        with suppress(OSError):
            for text in (self._folder / "cgroup.procs").read_text().split():
                home = self._home.get(int(text), self._folder.parent)
                with suppress(OSError):  # it may have ended meanwhile
                    _write(home / "cgroup.procs", text)
        with suppress(FileNotFoundError):
            self._folder.rmdir()


@contextmanager
def throttle(device: int, limits: Limits, pids: Iterable[int] = ()) -> Iterator[Throttle]:
    """Limit ``pids`` on a whole disk (kernel dev_t) while the context lasts.

    Direct I/O and reads are limited exactly; write-back of buffered writes belongs to the kernel's
    own threads and, with cgroup v1, is not.

    Raises:
        KvprobeError: not root, or no block I/O controller is mounted.
    """
    parent, version = find_controller()
    folder = parent / f"kvprobe-throttle-{os.getpid()}-{next(_numbers)}"
    try:
        if version == 2:
            _write(parent / "cgroup.subtree_control", "+io")
        folder.mkdir()
    except OSError as error:
        raise KvprobeError(
            f"cannot make a control group at {parent}: {error.strerror}",
            "run as root",
            ExitCode.UNSUPPORTED,
        ) from None
    group = Throttle(folder)
    try:
        set_limits(folder, version, device, limits)
        for pid in pids:
            group.add(pid)
        yield group
    finally:
        group.remove()


def find_controller(mounts: str = "/proc/self/mounts") -> tuple[Path, int]:
    """Where the block I/O controller is mounted, and the cgroup version there.

    Raises:
        KvprobeError: nowhere.
    """
    for line in Path(mounts).read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "blkio" in options.split(","):
            return Path(where), 1
        if kind == "cgroup2":
            with suppress(OSError):
                if "io" in Path(where, "cgroup.controllers").read_text().split():
                    return Path(where), 2
    raise KvprobeError(
        "no block I/O controller is mounted",
        "mount -t cgroup2 none /sys/fs/cgroup",
        ExitCode.UNSUPPORTED,
    )


def set_limits(folder: Path, version: int, device: int, limits: Limits) -> None:
    """Write the limits of one group.

    Raises:
        KvprobeError: the kernel refused them.
    """
    number = f"{device >> 20}:{device & 0xFFFFF}"
    given = {key: value for key, value in vars(limits).items() if value is not None}
    try:
        if version == 1:
            for key, value in given.items():
                _write(folder / _V1[key], f"{number} {value}")
        elif given:
            words = " ".join(f"{_V2[key]}={value}" for key, value in given.items())
            _write(folder / "io.max", f"{number} {words}")
    except OSError as error:
        raise KvprobeError(
            f"cannot limit device {number}: {error.strerror}", "it must be a whole disk"
        ) from None


def _group_of(pid: int, parent: Path) -> Path:
    """The group that a process is in now, in the hierarchy mounted at ``parent``."""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(",") or not controllers:
            group = parent / path.lstrip("/")
            if (group / "cgroup.procs").exists():
                return group
    return parent


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="ascii") as file:
        file.write(text)
