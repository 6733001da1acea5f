"""The stand-in library, built; programs that use it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile the stand-in; returns the library's path."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcufile.so.0"
    compiler = os.environ.get("CC", "cc")
    source = HERE / "cufile_standin.c"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-pthread"]
    subprocess.run([*command, source, "-o", library], check=True)
    return library


class Program:
    """A running ``cufile_driver.py``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid: int = self._answer()["pid"]

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def program(library: Path, mode: str) -> Iterator[Program]:
    """Start one; it ends with the block."""
    command = [sys.executable, "-I", "-S", str(HERE / "cufile_driver.py"), str(library)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUFILE_STANDIN": mode},
    )
    try:
        yield Program(process)
    finally:
        assert process.stdin and process.stdout
        process.stdin.close()
        process.wait(timeout=20)
        process.stdout.close()
