"""The prebuilt CO-RE objects: compile them, find them, and know whether they fit the sources.

An object holds all probes. There are two of them with the same text: one for kernels that have the
function ``bpf_rdonly_cast`` (6.2 and later), one for those that lack it. A wheel carries them ready
made; a checkout compiles them when the composed text changed.
``python -m kvprobe.bpf.core_object [FOLDER]`` builds them by hand.
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
from kvprobe.bpf.btf import Btf
from kvprobe.errors import ExitCode, KvprobeError

NAME = "kvprobe.bpf.o"
PLAIN_NAME = "kvprobe-plain.bpf.o"
CLANG = ("clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-unused-parameter")
"""Every probe has the whole dialect in front, so unused helpers are no fault."""
COMPILE_TIMEOUT_SECONDS = 120.0


def must_be_plain(kernel: Btf) -> bool:
    """Whether this kernel lacks what the better object calls."""
    return not kernel.has_function("bpf_rdonly_cast")


def source(*, plain: bool = False) -> compose.Source:
    """All probes of the content folder, composed for clang.

    Raises:
        KvprobeError: a probe is malformed.
    """
    return compose.compose(catalog.choose(None), bcc=False, plain=plain)


def name_of(composed: compose.Source) -> str:
    """The file name of the object made from this text."""
    return PLAIN_NAME if composed.plain else NAME


def digest(text: str) -> str:
    """What ties an object to the text and options that it was made from."""
    return hashlib.sha256("\0".join((*CLANG, text)).encode()).hexdigest()


def read(composed: compose.Source) -> bytes:
    """The object for this text, compiled now where the one at hand belongs to another text.

    Raises:
        KvprobeError: there is none that fits and it cannot be compiled here.
    """
    path = content.directory("probes") / name_of(composed)
    mark = digest(composed.text).encode()
    if path.is_file():
        image = content.ensure_trusted(path).read_bytes()
        if mark in image:
            return image
    with tempfile.TemporaryDirectory(prefix="kvprobe-") as folder:
        made = compile_to(Path(folder) / path.name, composed)
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
    """Build the objects into a folder, by default the content folder's ``probes``."""
    folder = Path(arguments[0]) if arguments else content.directory("probes")
    for plain in (False, True):
        composed = source(plain=plain)
        print(compile_to(folder / name_of(composed), composed))


if __name__ == "__main__":
    main(sys.argv[1:])
