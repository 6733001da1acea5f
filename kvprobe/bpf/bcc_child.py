"""Compile and load one program with bcc, in a process of its own.

bcc brings LLVM into the process that uses it: 100 MB that would stay for the whole capture, a
working directory that it changes, messages on file descriptor 2, and whatever a compiler does when
it crashes. So the loader runs this file by path with a bare interpreter: it reads a request from
standard input, sends the descriptors of the loaded programs and maps over a socket, and exits;
programs and maps live on in the receiver. Standard library and bcc only.

Request: ``{"text", "cflags", "programs": {name: program type}, "maps": [name..]}``.
Reply: ``{"programs": [name..], "maps": [name..]}`` with one descriptor per name in that
order, or ``{"error", "kind": "package" | "compile" | "load", "program"}`` without any.
"""

import importlib.util
import json
import os
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

DESCRIPTORS_PER_MESSAGE = 200
"""The kernel passes at most 253 in one message."""


class PackageError(Exception):
    """The bcc Python package is missing, or is another project of the same name."""


def import_bcc(folder: Path) -> Any:
    """Import ``bcc`` from one folder; nothing else of that folder becomes importable."""
    package = folder / "bcc"
    # PyPI has another project called bcc (a lattice library); the compiler's package has libbcc.py.
    if not (package / "libbcc.py").is_file():
        raise PackageError(f"no BPF Compiler Collection at {package}")
    spec: ModuleSpec | None = importlib.util.spec_from_file_location(
        "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise PackageError(f"{package} is not a Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, AttributeError) as error:
        raise PackageError(f"bcc at {package} does not load: {error}") from error
    return module


def compile_and_load(bcc: Any, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the reply and the descriptors that belong to it."""
    try:
        # allow_rlimit raises RLIMIT_MEMLOCK where the kernel still charges maps to it.
        module = bcc.BPF(text=request["text"], cflags=request["cflags"], allow_rlimit=True)
    except Exception as error:  # bcc raises the base class
        return {"error": str(error), "kind": "compile", "program": None}, []
    programs: dict[str, int] = {}
    for name, kind in request["programs"].items():
        try:
            programs[name] = module.load_func(name, kind).fd
        except Exception as error:
            return {"error": str(error), "kind": "load", "program": name}, []
    maps = {name: bcc.lib.bpf_table_fd(module.module, name.encode()) for name in request["maps"]}
    reply = {"programs": list(programs), "maps": list(maps)}
    return reply, [*programs.values(), *maps.values()]


def send(channel: socket.socket, reply: dict[str, Any], descriptors: list[int]) -> None:
    """Send descriptors in messages of one byte each, then the reply, then close."""
    for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        part = descriptors[start : start + DESCRIPTORS_PER_MESSAGE]
        socket.send_fds(channel, [b"\0"], part)
    channel.sendall(json.dumps(reply).encode())
    channel.close()


def main() -> None:
    """Serve one request; arguments are the channel's descriptor and bcc's folder."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    request = json.load(sys.stdin)
    try:
        reply, descriptors = compile_and_load(import_bcc(Path(sys.argv[2])), request)
    except PackageError as error:
        reply, descriptors = {"error": str(error), "kind": "package", "program": None}, []
    sys.stderr.flush()
    send(channel, reply, descriptors)
    os._exit(0)  # bcc's exit handlers would only take apart what has been handed over


if __name__ == "__main__":
    main()
