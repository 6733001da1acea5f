"""BPF programs that processes hold: how often each ran and for how long."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvprobe.bpf import attach, trial

_DESCRIPTOR_BY_ID, _INFO_BY_DESCRIPTOR = 13, 15
_INFO_BYTES = 216
_NAME_AT, _RUN_TIME_AT = 64, 192
"""Offsets in ``struct bpf_prog_info``; run_cnt and recursion_misses follow the run time."""


@dataclass(frozen=True)
class Runs:
    """Of one program, since it was loaded, while statistics were on."""

    name: str
    runs: int
    run_ns: int
    skipped: int
    """Times the kernel did not run it because one was running on that processor."""


@contextmanager
def statistics() -> Iterator[None]:
    """The kernel counts runs and their time meanwhile, at the price of two clock readings each."""
    descriptor = trial.statistics()
    try:
        yield
    finally:
        os.close(descriptor)


def held_by(pid: int) -> frozenset[int]:
    """Ids of the programs that a process has descriptors of; none where it has gone."""
    found = set()
    folder = Path(f"/proc/{pid}")
    try:
        numbers = os.listdir(folder / "fd")
    except OSError:
        return frozenset()
    for number in numbers:
        with suppress(OSError):  # that descriptor has just been closed
            if os.readlink(folder / "fd" / number) == "anon_inode:bpf-prog":
                for line in (folder / "fdinfo" / number).read_text().splitlines():
                    if line.startswith("prog_id:"):
                        found.add(int(line.split()[1]))
    return frozenset(found)


def held_by_others(ours: frozenset[int]) -> bool:
    """Whether a process that is not one of ``ours`` holds a program: somebody else is tracing."""
    others = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in ours)
    return any(held_by(pid) for pid in others)


def runs_of(program_ids: frozenset[int]) -> dict[int, Runs]:
    """What the kernel counted for each of these that still exists."""
    found = {}
    for number in sorted(program_ids):
        try:
            descriptor = attach.bpf(_DESCRIPTOR_BY_ID, struct.pack("=III", number, 0, 0))
        except OSError:
            continue
        try:
            found[number] = _info(descriptor)
        finally:
            os.close(descriptor)
    return found


def _info(descriptor: int) -> Runs:
    info = ctypes.create_string_buffer(_INFO_BYTES)
    attribute = struct.pack("=IIQ", descriptor, _INFO_BYTES, ctypes.addressof(info))
    attach.bpf(_INFO_BY_DESCRIPTOR, attribute)
    name = info.raw[_NAME_AT : _NAME_AT + 16].split(b"\0")[0].decode()
    run_ns, runs, skipped = struct.unpack_from("=QQQ", info.raw, _RUN_TIME_AT)
    return Runs(name, runs, run_ns, skipped)
