"""Load the prebuilt CO-RE object through libbpf. Milliseconds, and nothing is compiled."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from kvprobe.bpf import core_object, libbpf
from kvprobe.bpf.compose import FILTERS, Source
from kvprobe.bpf.loaded import Loaded, Plan
from kvprobe.errors import ExitCode, KvprobeError

NAME = "core"
_CONSTANTS_MAP = ".rodata.constants"


def load(source: Source, plan: Plan) -> Loaded:
    """Load the programs that the plan names, and the maps that they use.

    Args:
        source: all probes composed for clang (``core_object.source()``).
        plan: what to load.

    Raises:
        KvprobeError: no fitting object, no libbpf, or the kernel refuses a program.
    """
    image = core_object.read(source)
    lib = libbpf.library()
    with libbpf.Messages() as messages:
        opened = lib.bpf_object__open_mem(image, len(image), None)
        if not opened:
            raise _failure("cannot open the compiled probes", messages.lines)
        try:
            _prepare(opened, source, plan)
            if lib.bpf_object__load(opened):
                raise _failure("the kernel refuses the compiled probes", messages.lines)
            return _take_descriptors(opened, plan)
        finally:
            lib.bpf_object__close(opened)


def _prepare(opened: int, source: Source, plan: Plan) -> None:
    lib = libbpf.library()
    wanted_parts = {hook.probe for hook in source.hooks if hook.name in plan.programs} | {FILTERS}
    users = {item.name: item.users for item in source.maps}
    for name, program in libbpf.programs(opened):
        lib.bpf_program__set_autoload(program, name in plan.programs)
    for name, handle in libbpf.maps(opened):
        if name == _CONSTANTS_MAP:
            values = [plan.constants[key] & (2**64 - 1) for key in source.constants]
            packed = struct.pack(f"={len(values)}Q", *values)
            lib.bpf_map__set_initial_value(handle, packed, len(packed))
        elif wanted_parts.isdisjoint(users.get(name, ())):
            lib.bpf_map__set_autocreate(handle, False)
        elif name in plan.entries:
            lib.bpf_map__set_max_entries(handle, plan.entries[name])


def _take_descriptors(opened: int, plan: Plan) -> Loaded:
    """Keep our own copies; the object can then be closed and its memory freed."""
    lib = libbpf.library()
    programs = {
        name: _copy(lib.bpf_program__fd(program))
        for name, program in libbpf.programs(opened)
        if name in plan.programs
    }
    maps = {
        name: _copy(descriptor)
        for name, handle in libbpf.maps(opened)
        if (descriptor := lib.bpf_map__fd(handle)) >= 0
    }
    return Loaded(NAME, programs, maps)


def _copy(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _failure(what: str, lines: list[str]) -> KvprobeError:
    """The words of libbpf: the verifier's last line where there is one."""
    code = ctypes.get_errno()
    useful = [
        line.removeprefix("libbpf: ").strip()
        for line in lines
        if line.strip() and "processed " not in line and "PROG LOAD LOG" not in line
    ]
    refused = [line for line in useful if line.startswith("prog ") and "failed to load" in line]
    log = [line for line in useful if not line.startswith(("prog ", "failed to load object", "--"))]
    why = (log or useful or [os.strerror(code)])[-1]
    where = f" ({refused[0].split(':')[0]})" if refused else ""
    return KvprobeError(
        f"{what}{where}: {why}", "try: --loader bcc; or see: kvprobe doctor", ExitCode.UNSUPPORTED
    )
