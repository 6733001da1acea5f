"""The prebuilt CO-RE object: compile it, find it, and know whether it fits the sources.

One object holds all probes. A wheel carries it ready made; a checkout compiles it when the
composed text changed. ``python -m kvprobe.bpf.core_object [FOLDER]`` builds it by hand.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvprobe import content
from kvprobe.bpf import catalog, compose
from kvprobe.errors import ExitCode, KvprobeError

NAME = "kvprobe.bpf.o"
CLANG = ("clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-unused-parameter")
"""Every probe has the whole dialect in front, so unused helpers are no fault."""
COMPILE_TIMEOUT_SECONDS = 120.0


def source() -> compose.Source:
    """All probes of the content folder, composed for clang, with a mark of their digest.

    Raises:
        KvprobeError: a probe is malformed.
    """
    return compose.compose(catalog.choose(None), bcc=False)


def digest(text: str) -> str:
    """What ties an object to the text and options that it was made from."""
    return hashlib.sha256("\0".join((*CLANG, text)).encode()).hexdigest()


def read(composed: compose.Source) -> bytes:
    """The object for this text, compiled now where the one at hand belongs to another text.

    Raises:
        KvprobeError: there is none that fits and it cannot be compiled here.
    """
    path = content.directory("probes") / NAME
    mark = digest(composed.text).encode()
    if path.is_file():
        image = content.ensure_trusted(path).read_bytes()
        if mark in image:
            return image
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:
        made = compile_to(Path(folder) / NAME, composed)
        image = made.read_bytes()
        if os.access(path.parent, os.W_OK):
            beside = path.with_suffix(f".o.{os.getpid()}")
            beside.write_bytes(image)
            beside.replace(path)
    return image


def compile_to(path: Path, composed: compose.Source) -> Path:
    """Compile a composed text; debug information is dropped, BTF stays.

    Raises:
        KvprobeError: clang is missing or refuses the text.
    """
    if shutil.which(CLANG[0]) is None:
        raise KvprobeError(
            "no compiled probes for these sources, and no clang to compile them",
            "apt install clang llvm, or use --loader bcc",
            ExitCode.UNSUPPORTED,
        )
    mark = f'const char kv_digest[] SEC("kvprobe.digest") = "{digest(composed.text)}";\n'
    text = f'{composed.text}#line 1 "digest"\n{mark}'
    ran = subprocess.run(
        [*CLANG, *WARNINGS, "-x", "c", "-c", "-", "-o", str(path)],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_SECONDS,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        check=False,
    )
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if "error:" in line]
        raise KvprobeError(
            f"clang cannot compile the probes: {(errors or ran.stderr.splitlines() or [''])[0]}",
            "correct the probe named in front of the message",
            ExitCode.UNSUPPORTED,
        )
    if strip := shutil.which("llvm-strip"):
        subprocess.run([strip, "-g", str(path)], check=True, timeout=COMPILE_TIMEOUT_SECONDS)
    return path


def main(arguments: list[str]) -> None:
    """Build the object into a folder, by default the content folder's ``probes``."""
    folder = Path(arguments[0]) if arguments else content.directory("probes")
    print(compile_to(folder / NAME, source()))


if __name__ == "__main__":
    main(sys.argv[1:])
