"""The process table as adapters look at it, from procfs.

Paths in the arguments of a process in a container are those that the process sees;
``Process.seen_from`` is the prefix under which this one can open them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvprobe.adapter import Process

PROCFS = Path("/proc")
_STANDARD = ("1", "2")
_MOST_BYTES = 1 << 20
_ELSEWHERE = re.compile(r"/proc/(\d+)/root(/.*)", re.DOTALL)


class Environment(Mapping[str, str]):
    """Environment of a process, read when asked for; empty where it may not be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, str] | None = None

    @property
    def is_readable(self) -> bool:
        """Whether this process may read it: root, and who owns the other one."""
        return os.access(self._folder / "environ", os.R_OK) and bool(
            _text(self._folder / "environ")
        )

    def _values(self) -> dict[str, str]:
        if self._read is None:
            words = _words(self._folder / "environ")
            self._read = dict(word.split("=", 1) for word in words if "=" in word)
        return self._read

    def __getitem__(self, name: str) -> str:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


def processes(procfs: Path = PROCFS) -> Iterator[Process]:
    """Every process with a command line; what ends meanwhile is left out."""
    for folder in sorted(procfs.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        arguments = tuple(_words(folder / "cmdline"))
        if not arguments or not arguments[0]:
            continue  # a kernel thread, or gone
        # comm may hold anything, also ") ", so the fields are counted from its end.
        stat_line = _text(folder / "stat")
        name, _, fields = stat_line.partition("(")[2].rpartition(") ")
        if not fields or fields.startswith("Z"):
            continue
        prefix = _prefix(folder, procfs)
        yield Process(
            pid=int(folder.name),
            parent=int(fields.split(" ")[1]),
            name=name,
            arguments=arguments,
            environment=Environment(folder),
            folder=_link(folder / "cwd"),
            log=_log(folder, prefix),
            seen_from=prefix,
        )


def own_name(path: str) -> str:
    """The name by which this process has a file of a container (one below a ``seen_from``).

    The same folder is often mounted here too, under the same or another name; else ``path``.
    """
    elsewhere = _ELSEWHERE.fullmatch(path)
    if elsewhere is None:
        return path
    pid, inside = elsewhere.groups()
    for name in (inside, *_names_by_mounts(pid, inside)):
        try:
            if os.path.samefile(path, name):
                return name
        except OSError:
            continue
    return path


def _names_by_mounts(pid: str, inside: str) -> Iterator[str]:
    """Where the file system that a process has a path on is mounted here."""
    theirs = [m for m in _mounts(PROCFS / pid) if _is_below(inside, m[2])]
    if not theirs:
        return
    device, root, point = max(theirs, key=lambda mount: len(mount[2]))
    below = os.path.join(root, inside[len(point) :].lstrip("/"))
    for other, top, place in _mounts(PROCFS / "self"):
        if other == device and _is_below(below, top):
            yield os.path.join(place, below[len(top) :].lstrip("/"))


def _mounts(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Device, folder of its file system, and mount point, of each line of mountinfo."""
    for line in _text(folder / "mountinfo").splitlines():
        fields = line.split(" ", 5)
        if len(fields) == 6:
            yield fields[2], _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _log(folder: Path, prefix: str) -> str | None:
    """The file that standard output, or else standard error, goes to, as the process names it."""
    for number in _STANDARD:
        target = _link(folder / "fd" / number)
        if target is None or not target.startswith("/") or target.endswith(" (deleted)"):
            continue
        try:
            status = os.stat(f"{prefix}{target}")
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            return target
    return None


def _prefix(folder: Path, procfs: Path) -> str:
    """Under what the files of a process are found from here; empty where it sees what we see."""
    own, other = _link(procfs / "self" / "ns" / "mnt"), _link(folder / "ns" / "mnt")
    root = _link(folder / "root")
    if other is None or root is None or (own == other and root == "/"):
        return ""
    return str(folder / "root")


def _words(path: Path) -> list[str]:
    text = _text(path)
    return text.removesuffix("\0").split("\0") if text else []


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return os.fsdecode(file.read(_MOST_BYTES))
    except OSError:
        return ""


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
