"""Attaching a loaded program by system call, so that every loader attaches in the same way.

libbpf and bcc both look events up in a mounted tracefs; these functions need none.
Closing the returned descriptor detaches.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvprobe.bpf import tracefs
from kvprobe.errors import ExitCode, KvprobeError

# System call numbers of bpf(2) and perf_event_open(2); arm64 and riscv64 use the generic table.
_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241), "riscv64": (280, 241)}

_BPF_RAW_TRACEPOINT_OPEN = 17
_PERF_TYPE_TRACEPOINT = 2
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_SET_BPF = 0x40042408
_PERF_ATTR = struct.Struct("=IIQQQQQIIQQ")
"""The second version of perf_event_attr, 72 bytes: type, size, config, sample_period, sample_type,
read_format, flags, wakeup_events, bp_type, config1, config2."""
FUNCTION_EVENTS = Path("/sys/bus/event_source/devices/kprobe")
"""How perf knows function probes; absent where the kernel has none."""
LIBRARY_EVENTS = FUNCTION_EVENTS.parent / "uprobe"
"""The same for probes in user space."""
_CLOSING_THREADS = 32


def _syscall(index: int, *args: object) -> int:
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise KvprobeError(
            f"cannot use BPF on {machine}",
            "kvprobe runs on x86_64 and aarch64",
            ExitCode.UNSUPPORTED,
        )
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    result = int(library.syscall(ctypes.c_long(_NUMBERS[machine][index]), *args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def bpf(command: int, attribute: bytes) -> int:
    """Make the BPF system call; ``attribute`` is the leading part of ``union bpf_attr``.

    Raises:
        OSError: what the kernel answered.
    """
    return _syscall(0, command, ctypes.create_string_buffer(attribute), len(attribute))


def attach_raw_tracepoint(program: int, name: str) -> int:
    """Attach to a raw tracepoint; ``name`` is empty for a tp_btf program, which carries its own.

    Raises:
        KvprobeError: the tracepoint does not exist or the kernel refused.
    """
    text = ctypes.create_string_buffer(name.encode())
    address = ctypes.addressof(text) if name else 0
    try:
        return bpf(_BPF_RAW_TRACEPOINT_OPEN, struct.pack("=QII", address, program, 0))
    except OSError as error:
        raise _refused(f"raw tracepoint {name}", error) from error


def attach_tracepoint(program: int, category: str, name: str) -> int:
    """Attach to an event of tracefs.

    Raises:
        KvprobeError: the event does not exist, tracefs cannot be read, or the kernel refused.
    """
    number = tracefs.tracepoint_id(category, name)
    if number is None:
        raise _refused(f"tracepoint {category}:{name}", OSError(errno.ENOENT, "no such event"))
    try:
        return _run_at(_perf_event(_PERF_TYPE_TRACEPOINT, number), program)
    except OSError as error:
        raise _refused(f"tracepoint {category}:{name}", error) from error


def attach_function(program: int, name: str, on_return: bool) -> int:
    """Attach to the beginning of a kernel function, or to its return.

    Raises:
        KvprobeError: no such function, it cannot be traced, or the kernel has no function probes.
    """
    try:
        return _run_at(_function_event(name, on_return), program)
    except OSError as error:
        raise _refused(f"function {name}", error) from error


def attach_library(program: int, path: str, offset: int, on_return: bool) -> int:
    """Attach to a function of a shared library, in every process that runs it now or later.

    Args:
        program: its descriptor.
        path: of the library's file; only its inode counts.
        offset: of the function in the file.
        on_return: whether at its return.

    Raises:
        KvprobeError: the file is gone, or the kernel has no probes in user space.
    """
    text = ctypes.create_string_buffer(os.fsencode(path))
    try:
        event = _probe_event(LIBRARY_EVENTS, on_return, ctypes.addressof(text), offset)
        return _run_at(event, program)
    except OSError as error:
        raise _refused(path, error) from error


def traceable(names: Iterable[str]) -> frozenset[str]:
    """Those kernel functions at which a program could be attached now; found by trying."""
    events = {}
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            events[name] = _function_event(name, on_return=False)
    detach(events.values())
    return frozenset(events)


def detach(descriptors: Iterable[int]) -> None:
    """Close what was attached, in about this order.

    Each closing waits until no CPU runs the program; the waits overlap in threads.
    """
    with ThreadPoolExecutor(_CLOSING_THREADS) as threads:
        list(threads.map(os.close, descriptors))


def _function_event(name: str, on_return: bool) -> int:
    """Descriptor of a perf event that nothing reads yet."""
    text = ctypes.create_string_buffer(name.encode())
    return _probe_event(FUNCTION_EVENTS, on_return, ctypes.addressof(text), 0)


def _probe_event(events: Path, on_return: bool, place: int, offset: int) -> int:
    number = int((events / "type").read_text())
    bit = int((events / "format/retprobe").read_text().removeprefix("config:"))
    return _perf_event(number, on_return << bit, place, offset)


def _perf_event(kind: int, config: int, config1: int = 0, config2: int = 0) -> int:
    attribute = ctypes.create_string_buffer(
        _PERF_ATTR.pack(kind, _PERF_ATTR.size, config, 1, 0, 0, 0, 1, 0, config1, config2)
    )
    # The program sees every task on every CPU, whichever CPU the event is opened on.
    return _syscall(1, attribute, -1, 0, -1, _PERF_FLAG_FD_CLOEXEC)


def _run_at(event: int, program: int) -> int:
    try:
        fcntl.ioctl(event, _PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(event, _PERF_EVENT_IOC_ENABLE, 0)
    except OSError:
        os.close(event)
        raise
    return event


def _refused(where: str, error: OSError) -> KvprobeError:
    return KvprobeError(
        f"cannot attach to {where}: {error.strerror}",
        "see what this machine offers with: kvprobe doctor",
        ExitCode.UNSUPPORTED,
    )
