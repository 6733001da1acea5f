"""What this machine lets kvprobe do: each answer is found by trying, never from a version number.

A ``Feature`` says what was found, what a capture loses without it, and the command that helps.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from kvprobe.bpf import attach, btf, machine, tracefs, trial
from kvprobe.bpf.kernel_types import is_loaded

_CGROUPS = Path("/sys/fs/cgroup")
_SUDO_PATH = (Path("/usr/bin"), Path("/usr/local/bin"), Path("/usr/sbin"), Path("/usr/local/sbin"))
RING_BYTES = 16 << 20
"""The size of ring buffer that is tried."""
_ALWAYS_TRACEABLE = "vfs_read"
"""A function that every kernel with function probes lets one trace."""


class State(StrEnum):
    """Whether something is there; ``unknown``: only root can find out."""

    OK = "ok"
    DEGRADED = "degraded"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Feature:
    """One property of this machine. ``required``: without it there is no capture at all."""

    group: str
    name: str
    state: State
    why: str
    effect: str = ""
    fix: str = ""
    required: bool = False

    @property
    def stops_capture(self) -> bool:
        """Whether nothing can be captured because of this."""
        return self.required and self.state is State.ABSENT


Answer: TypeAlias = tuple[State, str, str, str]
"""State, why, effect, fix."""


def ok(why: str) -> Answer:
    """It is there."""
    return State.OK, why, "", ""


def degraded(why: str, effect: str, fix: str) -> Answer:
    """It is not, and a capture shows less."""
    return State.DEGRADED, why, effect, fix


def absent(why: str, effect: str, fix: str) -> Answer:
    """It is not."""
    return State.ABSENT, why, effect, fix


def unknown() -> Answer:
    """It takes rights that this process lacks to find out."""
    return State.UNKNOWN, "needs root to find out", "", ""


def survey() -> tuple[Feature, ...]:
    """The kernel, in the order in which a person would check it."""
    may_try = has_rights()
    return tuple(
        Feature(
            "kernel",
            name,
            *(unknown() if check in _NEED_RIGHTS and not may_try else check()),
            required=required,
        )
        for name, required, check in _CHECKS
    )


def has_rights() -> bool:
    """Whether this process may use BPF at all."""
    return _rights()[0] is not State.ABSENT


def _as_root() -> str:
    """The command that asks again with rights: the same options, and a program that sudo finds.

    sudo does not search the caller's PATH.
    """
    called, *words = sys.argv
    asked = shlex.join(words) if "doctor" in words else "doctor"
    program = Path(called).name
    if program == "__main__.py":
        return f"sudo {shlex.quote(sys.executable)} -m kvprobe {asked}"
    found = shutil.which(program)
    if program != "kvprobe" or found is None or Path(found).parent in _SUDO_PATH:
        return f"sudo kvprobe {asked}"
    return f"sudo {shlex.quote(found)} {asked}"


# ---------------------------------------------------------------- kernel


def _release() -> Answer:
    machine = platform.machine()
    why = f"Linux {platform.release()} on {machine}"
    if machine in ("x86_64", "aarch64"):
        return ok(why)
    return absent(why, "no capture", "kvprobe runs on x86_64 and aarch64")


def _rights() -> Answer:
    held = trial.capabilities()
    if os.geteuid() == 0 and "SYS_ADMIN" in held:
        return ok("root")
    if held >= {"BPF", "PERFMON"}:
        return degraded(
            f"user {os.geteuid()} with CAP_BPF and CAP_PERFMON",
            "files that were open before the capture have no path",
            _as_root(),
        )
    if os.geteuid() == 0:
        return absent(
            "root without CAP_SYS_ADMIN", "no capture", "start the container with --privileged"
        )
    return absent(f"user {os.geteuid()}, not root", "no capture", _as_root())


def _type_information() -> Answer:
    try:
        size = btf.VMLINUX.stat().st_size
    except OSError:
        return absent(
            f"{btf.VMLINUX} is missing",
            "no capture: the layout of kernel structures is unknown",
            "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, as current distributions do",
        )
    return ok(f"{size / 2**20:.1f} MiB of kernel type information")


def _programs() -> Answer:
    error = trial.error_of(trial.program)
    if error is None:
        return ok("load")
    why = f"refused: {error.strerror}"
    if error.errno == errno.ENOSYS:
        return absent(why, "no capture", "use a kernel built with CONFIG_BPF_SYSCALL=y")
    if "SYS_ADMIN" not in trial.capabilities():
        return absent(why, "no capture", _as_root())
    if trial.process_status("Seccomp") not in ("", "0"):
        why += ", a seccomp filter is active"
    return absent(why, "no capture", "allow bpf(2) in the container's seccomp profile")


def _kernel_memory() -> Answer:
    error = trial.error_of(lambda: trial.program(trial.READ_KERNEL))
    if error is None:
        mode = trial.lockdown()
        return ok(f"allowed, lockdown is {mode}" if mode else "allowed")
    effect = "no capture: device, size and file of a request cannot be read"
    if trial.lockdown() == "confidentiality":
        return absent("lockdown is confidentiality", effect, "boot with lockdown=integrity")
    return absent(f"refused: {error.strerror}", effect, _as_root())


def _ring_buffer() -> Answer:
    error = trial.error_of(lambda: trial.ring_buffer(RING_BYTES))
    if error is None:
        return ok(f"{RING_BYTES >> 20} MiB can be had")
    if error.errno == errno.EINVAL:
        return absent("not in this kernel", "no capture", "use Linux 5.8 or newer")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if "SYS_ADMIN" in trial.capabilities() and 0 <= limit < RING_BYTES:
        return absent(
            f"memory lock limit is {limit >> 10} KiB", "no capture", "ulimit -l unlimited"
        )
    return absent(f"refused: {error.strerror}", "no capture", _as_root())


def _tracefs() -> Answer:
    place = tracefs.mounted()
    if place is not None:
        return ok(f"mounted at {place}")
    if tracefs.root() is not None:
        return ok("not mounted; kvprobe reads it through a private mount")
    return degraded(
        "not mounted, or not readable",
        "reads, writes and opens of the engine are not seen, only block requests",
        "mount -t tracefs tracefs /sys/kernel/tracing",
    )


def _symbols() -> Answer:
    try:
        with open("/proc/kallsyms") as file:  # the first ones may be offsets, and 0 rightly
            visible = any(int(line.split()[0], 16) for line in islice(file, 200))
    except (OSError, IndexError, ValueError):
        visible = False
    if visible:
        return ok("addresses can be read")
    return degraded(
        "addresses in /proc/kallsyms are hidden",
        "direct I/O is tied to its process but not to its file",
        _as_root() if os.geteuid() else "sysctl kernel.kptr_restrict=1",
    )


def _statistics() -> Answer:
    error = trial.error_of(trial.statistics)
    if error is None:
        return ok("can be switched on")
    return degraded(
        f"refused: {error.strerror}", "kvprobe cannot say what its own probes cost", _as_root()
    )


def _process_ids() -> Answer:
    if machine.in_initial_pid_namespace():
        return ok("those of the host")
    return degraded(
        "a container with process ids of its own",
        "process filters match nothing: the kernel reports the host's ids",
        "start the container with --pid=host",
    )


def _function_probes() -> Answer:
    devices = attach.FUNCTION_EVENTS.parent
    uprobe = "available" if (devices / "uprobe/type").exists() else "not built in"
    if not attach.FUNCTION_EVENTS.is_dir():
        why = "kprobe not built in"
    elif has_rights() and not attach.traceable((_ALWAYS_TRACEABLE,)):
        why = "kprobe built in, but refused"
    else:
        return ok(f"kprobe available; uprobe {uprobe}")
    why = f"{why}; uprobe {uprobe}"
    if not is_loaded("nvme_core"):
        return ok(f"{why}; nothing here needs them")
    return degraded(why, "what happens inside an NVMe transport is not told apart", "")


def _cgroups() -> Answer:
    if (_CGROUPS / "cgroup.controllers").exists():
        return ok("version 2")
    return ok("version 1" + (" and 2" if (_CGROUPS / "unified").is_dir() else ""))


_CHECKS: tuple[tuple[str, bool, Callable[[], Answer]], ...] = (
    ("kernel", True, _release),
    ("rights", True, _rights),
    ("BTF", True, _type_information),
    ("BPF programs", True, _programs),
    ("kernel memory", True, _kernel_memory),
    ("ring buffer", True, _ring_buffer),
    ("tracefs", False, _tracefs),
    ("kernel symbols", False, _symbols),
    ("BPF statistics", False, _statistics),
    ("process ids", False, _process_ids),
    ("function probes", False, _function_probes),
    ("control groups", False, _cgroups),
)
_NEED_RIGHTS = (_programs, _kernel_memory, _ring_buffer, _tracefs, _symbols, _statistics)
