"""Small things done to see whether this machine allows them; each leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

from kvprobe.bpf import attach, tracefs
from kvprobe.errors import KvprobeError

_BPF_MAP_CREATE, _BPF_PROG_LOAD, _BPF_ENABLE_STATS = 0, 5, 32
_MAP_TYPE_RINGBUF = 27
_PROG_TYPE_RAW_TRACEPOINT = 17
_CAPABILITIES = {"SYS_ADMIN": 21, "PERFMON": 38, "BPF": 39}


def _instruction(code: int, registers: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, registers, 0, value)


DO_NOTHING = _instruction(0xB7) + _instruction(0x95)
"""``r0 = 0; exit``"""
READ_KERNEL = (
    _instruction(0xBF, 0xA1)  # r1 = r10
    + _instruction(0x07, 1, -8)  # r1 += -8
    + _instruction(0xB7, 2, 8)  # r2 = 8
    + _instruction(0xB7, 3)  # r3 = 0
    + _instruction(0x85, 0, 113)  # call bpf_probe_read_kernel
    + DO_NOTHING
)


def program(instructions: bytes = DO_NOTHING) -> int:
    """Load a raw tracepoint program and return its descriptor.

    Raises:
        OSError: the kernel refuses.
    """
    code = ctypes.create_string_buffer(instructions)
    license_name = ctypes.create_string_buffer(b"GPL")
    # prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version, prog_flags
    attribute = struct.pack(
        "=IIQQIIQII",
        *(_PROG_TYPE_RAW_TRACEPOINT, len(instructions) // 8),
        *(ctypes.addressof(code), ctypes.addressof(license_name)),
        *(0, 0, 0, 0, 0),
    )
    return attach.bpf(_BPF_PROG_LOAD, attribute)


def ring_buffer(size_bytes: int) -> int:
    """Make a ring buffer map and return its descriptor.

    Raises:
        OSError: the kernel refuses.
    """
    return attach.bpf(
        _BPF_MAP_CREATE, struct.pack("=IIIII", _MAP_TYPE_RINGBUF, 0, 0, size_bytes, 0)
    )


def statistics() -> int:
    """Switch run-time statistics of programs on, until the returned descriptor is closed.

    Raises:
        OSError: the kernel refuses.
    """
    return attach.bpf(_BPF_ENABLE_STATS, struct.pack("=I", 0))


def error_of(action: Callable[[], int]) -> OSError | None:
    """Do something that returns a descriptor, close it, and return the error if there was one."""
    try:
        os.close(action())
    except OSError as error:
        return error
    return None


def raw_tracepoint(name: str) -> bool | None:
    """Whether a program can be attached to this raw tracepoint; None without the right to try."""
    try:
        loaded = program()
    except OSError:
        return None
    try:
        os.close(attach.attach_raw_tracepoint(loaded, name))
        return True
    except KvprobeError:
        return False
    finally:
        os.close(loaded)


def process_status(field: str) -> str:
    """One line of /proc/self/status, or an empty text."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split(":", 1)[1].strip()
    return ""


def capabilities() -> frozenset[str]:
    """Those of this process that matter here: ``SYS_ADMIN``, ``PERFMON``, ``BPF``."""
    effective = int(process_status("CapEff") or "0", 16)
    return frozenset(name for name, bit in _CAPABILITIES.items() if effective >> bit & 1)


def lockdown() -> str | None:
    """The active lockdown mode, or None where there is none or it cannot be read."""
    place = Path("/sys/kernel/security")
    descriptor = None
    if not (place / "lockdown").exists():
        descriptor = tracefs.detached_mount("securityfs")
        if descriptor is None:
            return None
        place = Path(f"/proc/self/fd/{descriptor}")
    try:
        text = (place / "lockdown").read_text()
    except OSError:
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return text.partition("[")[2].partition("]")[0] or None
