"""Compile probes on the node with Debian's bcc, without kernel headers.

The work happens in a child process (``bcc_child.py``) that hands over file descriptors.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.bpf import bcc_child, stubs
from kvprobe.errors import ExitCode, KvprobeError

DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")
COMPILE_TIMEOUT_SECONDS = 300.0
"""A compile takes 0.2 s; under full machine emulation, half a minute."""


@dataclass(frozen=True)
class Handover:
    """Descriptors of what the child loaded; the receiver owns and closes them."""

    programs: Mapping[str, int]
    maps: Mapping[str, int]
    version: str


def compile_and_load(
    text: str,
    cflags: Sequence[str],
    programs: Mapping[str, int],
    packages: Path = DEBIAN_PACKAGES,
) -> Handover:
    """Compile C text and load its programs.

    Args:
        text: a complete program in bcc's dialect.
        cflags: options for the compiler, such as ``-DO_request_bio=56``.
        programs: function name -> BPF program type.
        packages: folder that holds Debian's ``bcc`` package.

    Raises:
        KvprobeError: bcc is missing or another project, the text does not compile, or the
            kernel refuses a program.
    """
    request = {"text": text, "cflags": list(cflags), "programs": dict(programs)}
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:  # mode 0700
        reply, descriptors, log = _ask_child(request, Path(folder), packages)
    if "error" in reply:
        raise _failure(reply, log, packages)
    names = [*reply["programs"], *reply["maps"]]
    by_name = dict(zip(names, descriptors, strict=True))
    return Handover(
        {name: by_name[name] for name in reply["programs"]},
        {name: by_name[name] for name in reply["maps"]},
        reply["version"],
    )


def _ask_child(
    request: Mapping[str, Any], folder: Path, packages: Path
) -> tuple[dict[str, Any], list[int], str]:
    headers = os.environ.get(stubs.HEADERS_VARIABLE)
    if headers:
        source = stubs.headers_of_this_kernel(Path(headers))
    else:
        source = folder / "kernel"
        stubs.write(source)
    ours, theirs = socket.socketpair()
    with ours, theirs, (folder / "log").open("w+b") as log:
        child = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                bcc_child.__file__,
                str(theirs.fileno()),
                str(packages),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            cwd=folder,
            # Nothing else: CPATH, ARCH and the like would change what is compiled.
            env={"PATH": os.defpath, "LC_ALL": "C", "BCC_KERNEL_SOURCE": str(source)},
        )
        theirs.close()
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
            ours.settimeout(COMPILE_TIMEOUT_SECONDS)
            reply, descriptors = _receive(ours)
        except (TimeoutError, BrokenPipeError):
            reply, descriptors = {"error": "no answer from the compiler", "kind": "compile"}, []
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
        descriptors += passed
        text += data.lstrip(b"\0")
    if text:
        return json.loads(text), descriptors
    return {"error": "the compiler crashed", "kind": "compile"}, descriptors


def _failure(reply: Mapping[str, Any], log: str, packages: Path) -> KvprobeError:
    """One line for the reader, the whole log in a file."""
    if reply["kind"] == "package":
        return KvprobeError(
            str(reply["error"]),
            "apt install python3-bpfcc, or use --loader core",
            ExitCode.UNSUPPORTED,
        )
    descriptor, path = tempfile.mkstemp(prefix="kvprobe-bcc-", suffix=".log")
    with os.fdopen(descriptor, "w") as kept:
        kept.write(log)
    if reply["kind"] == "compile":
        first = re.search(r"error: (.*)", log)
        what = first.group(1) if first else str(reply["error"])
        message = f"bcc cannot compile the probes: {what}"
    else:
        # The verifier explains itself in its last line, before its statistics.
        lines = [line for line in log.splitlines() if line.strip() and "processed " not in line]
        why = lines[-1].strip() if lines else str(reply["error"])
        message = f"the kernel refuses program {reply['program']}: {why}"
    return KvprobeError(message, f"the compiler's messages are in {path}", ExitCode.UNSUPPORTED)
