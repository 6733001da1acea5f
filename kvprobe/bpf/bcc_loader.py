"""Compile probes on the node with Debian's bcc, without kernel headers.

Offsets, sizes and constants reach the C text as macros: the offsets come from the running
kernel's BTF. Compiling happens in a child process (``bcc_child.py``) that hands over descriptors.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvprobe.bpf import bcc_child, stubs
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.compose import Source, kernel_name
from kvprobe.bpf.kernel_types import KernelTypes
from kvprobe.bpf.loaded import Loaded, Plan
from kvprobe.errors import ExitCode, KvprobeError

NAME = "bcc"
DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")
COMPILE_TIMEOUT_SECONDS = 300.0
"""A compile takes a fraction of a second; under full machine emulation, half a minute."""

_KPROBE = 2
"""The type of all programs that the kernel hands a set of registers."""
_PROGRAM_TYPES = {"raw": 17, "sys_enter": 5, "sys_exit": 5, "enter": _KPROBE, "exit": _KPROBE}
_PROGRAM_TYPES |= {"library_enter": _KPROBE, "library_exit": _KPROBE}
_NO_SUCH_FIELD = 195896080
"""A helper that does not exist. Like libbpf, kvprobe puts a call of it where a program uses a field
that this kernel lacks: the verifier refuses the program only if that place can be reached."""


def load(source: Source, plan: Plan, kernel: Btf | None = None) -> Loaded:
    """Compile the text and load the programs that the plan names.

    Args:
        source: probes composed for bcc.
        plan: what to load.
        kernel: type information of the running kernel, where the caller has it already.

    Raises:
        KvprobeError: bcc is missing or another project, the text does not compile, the kernel
            lacks a field that a program needs or refuses the program.
    """
    types = KernelTypes(kernel or Btf.load(), source.modules)
    kinds = {hook.name: _PROGRAM_TYPES[hook.kind] for hook in source.hooks}
    request = {
        "text": _with_entries(source, plan),
        "cflags": [f"-D{name}={value}" for name, value in macros(source, plan, types)],
        "programs": {name: kinds[name] for name in sorted(plan.programs)},
        "maps": [item.name for item in source.maps],
    }
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:  # mode 0700
        reply, descriptors, log = _ask_child(request, Path(folder), DEBIAN_PACKAGES)
    if "error" in reply:
        raise _failure(reply, log)
    names = [*reply["programs"], *reply["maps"]]
    by_name = dict(zip(names, descriptors, strict=True))
    return Loaded(
        NAME,
        {name: by_name[name] for name in reply["programs"]},
        {name: by_name[name] for name in reply["maps"]},
    )


def macros(source: Source, plan: Plan, types: KernelTypes) -> Iterator[tuple[str, str]]:
    """What the dialect's bcc half expects to be defined, name and value.

    Raises:
        KvprobeError: a field is a bit field, which cannot be read by its offset.
    """
    for structure, field in source.fields:
        found = types.field(kernel_name(structure), field)
        if found and found.bits:
            raise KvprobeError(
                f"{structure}.{field} is a bit field in this kernel",
                "use --loader core",
                ExitCode.UNSUPPORTED,
            )
        name = f"{structure}_{field}"
        yield f"O_{name}", str(found.offset) if found else f"((u64(*)(void)){_NO_SUCH_FIELD})()"
        yield f"H_{name}", "1" if found else "0"
        yield f"S_{name}", str(found.size) if found else "0"
    for structure in source.types:
        yield f"T_{structure}", str(types.size(kernel_name(structure)) or 0)
    for kind, name in source.constants:
        yield f"KV_{kind}_{name}", f"{plan.constants[kind, name] & (2**64 - 1):#x}ULL"
    for item in source.maps:
        if item.kind == "RING":
            pages = plan.entries[item.name] // os.sysconf("SC_PAGE_SIZE")
            yield f"KV_RING_PAGES_{item.name}", str(pages)


def _with_entries(source: Source, plan: Plan) -> str:
    """The text with the plan's sizes of maps in place of the declared ones; rings have macros."""
    text = source.text
    for item in source.maps:
        if item.kind != "RING" and item.name in plan.entries:
            declared = re.compile(rf"^({item.kind}\({item.name},[^()]*,)[^(),]*\);", re.M)
            text = declared.sub(rf"\g<1> {plan.entries[item.name]});", text)
    return text


def _ask_child(
    request: Mapping[str, Any], folder: Path, packages: Path
) -> tuple[dict[str, Any], list[int], str]:
    """Run the child; returns its reply, the descriptors and what the compiler printed."""
    headers = os.environ.get(stubs.HEADERS_VARIABLE)
    if headers:
        kernel_source = stubs.headers_of_this_kernel(Path(headers))
    else:
        kernel_source = folder / "kernel"
        stubs.write(kernel_source)
    ours, theirs = socket.socketpair()
    with ours, (folder / "log").open("w+b") as log:
        with theirs:
            number = str(theirs.fileno())
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", bcc_child.__file__, number, str(packages)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                # Nothing else: CPATH, ARCH and the like would change what is compiled.
                env={
                    "PATH": os.defpath,
                    "LC_ALL": "C",
                    "TMPDIR": str(folder),
                    "BCC_KERNEL_SOURCE": str(kernel_source),
                },
            )
        try:
            ours.settimeout(COMPILE_TIMEOUT_SECONDS)
            with child.stdin or open(os.devnull, "wb") as channel:
                channel.write(json.dumps(request).encode())
            reply, descriptors = _receive(ours)
        except OSError:  # a timeout, or the child has gone
            reply, descriptors = {"error": "the compiler does not answer", "kind": "compile"}, []
        finally:
            child.kill()  # it has nothing left to do once the channel is closed
            child.wait()
        log.seek(0)
        return reply, descriptors, log.read().decode("utf-8", "replace")


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    descriptors: list[int] = []
    text = b""
    while True:
        data, passed, _flags, _address = socket.recv_fds(
            channel, 65536, bcc_child.DESCRIPTORS_PER_MESSAGE
        )
        if not data:
            break
        for descriptor in passed:
            os.set_inheritable(descriptor, False)  # recv_fds passes no MSG_CMSG_CLOEXEC on
        descriptors += passed
        text += data.lstrip(b"\0")
    if text:
        return json.loads(text), descriptors
    return {"error": "the compiler crashed", "kind": "compile"}, descriptors


def _failure(reply: Mapping[str, Any], log: str) -> KvprobeError:
    """One line for the reader, the whole log in a file."""
    if reply["kind"] == "package":
        return KvprobeError(
            str(reply["error"]),
            "apt install python3-bpfcc, or use --loader core",
            ExitCode.UNSUPPORTED,
        )
    if reply["kind"] == "compile":
        first = re.search(r"^(?:\S*/)?(\S+:\d+):\d+: error: (.*)$", log, re.M)
        why = f"{first.group(1)}: {first.group(2)}" if first else str(reply["error"])
        message = f"bcc cannot compile the probes: {why}"
    else:
        # The verifier explains itself in its last line, before its statistics.
        lines = [line for line in log.splitlines() if line.strip() and "processed " not in line]
        why = lines[-1].strip() if lines else str(reply["error"])
        if str(_NO_SUCH_FIELD) in why:
            why = "it uses a field that this kernel does not have"
        message = f"the kernel refuses program {reply['program']}: {why}"
    descriptor, path = tempfile.mkstemp(prefix="kvprobe-bcc-", suffix=".log")
    with os.fdopen(descriptor, "w") as kept:
        kept.write(log)
    return KvprobeError(message, f"all messages are in {path}", ExitCode.UNSUPPORTED)
