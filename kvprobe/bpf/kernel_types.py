"""The types of the running kernel and of the modules that it has loaded, asked as one.

Like libbpf, kvprobe takes a structure from the kernel itself where it has one of that name, and
looks into the modules only where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from kvprobe.bpf.btf import TRACEPOINT_TYPEDEF, VMLINUX, Btf, Field

MODULES = Path("/sys/module")
_T = TypeVar("_T")


class KernelTypes:
    """Answers of a kernel's BTF, and of its modules' on top of it.

    Args:
        kernel: the image of the kernel itself.
        modules: names of modules that are asked before the others.
        folder: where there is one image per loaded module.
    """

    def __init__(
        self, kernel: Btf, modules: Iterable[str] = (), folder: Path = VMLINUX.parent
    ) -> None:
        self._kernel = kernel
        self._preferred = tuple(modules)
        self._folder = folder
        self._parsed: dict[str, Btf] = {}

    def field(self, struct_name: str, path: str) -> Field | None:
        """Where a member is (see ``Btf.field``); None where there is none."""
        if self._kernel.size(struct_name) is not None:
            return self._kernel.field(struct_name, path)
        return self._first(struct_name, lambda btf: btf.field(struct_name, path))

    def size(self, struct_name: str) -> int | None:
        """Bytes of a structure or union; None where there is none of that name."""
        return self._first(struct_name, lambda btf: btf.size(struct_name))

    def enumerator(self, name: str) -> int | None:
        """Value of an enumerator; None where there is none of that name."""
        return self._first(name, lambda btf: btf.enumerator(name))

    def tracepoint_args(self, name: str) -> int | None:
        """How many arguments a raw tracepoint passes; None where there is no such tracepoint."""
        return self._first(TRACEPOINT_TYPEDEF + name, lambda btf: btf.tracepoint_args(name))

    def _first(self, name: str, ask: Callable[[Btf], _T | None]) -> _T | None:
        answer = ask(self._kernel)
        if answer is not None:
            return answer
        # A module's image has no copy of a name that the kernel's own image has.
        known = self._kernel.has_string(name)
        wanted = b"\0" + name.encode() + b"\0"
        for module, image in self._images.items():
            if known or wanted in image:
                answer = ask(self._module(module))
                if answer is not None:
                    return answer
        return None

    @cached_property
    def _images(self) -> dict[str, bytes]:
        """The image of each module, as it is; only few are ever taken apart."""
        names = sorted(path.name for path in self._folder.iterdir() if path.name != VMLINUX.name)
        names.sort(key=lambda name: name not in self._preferred)
        return {name: (self._folder / name).read_bytes() for name in names}

    def _module(self, name: str) -> Btf:
        if name not in self._parsed:
            source = str(self._folder / name)
            self._parsed[name] = Btf(self._images[name], self._kernel, source)
        return self._parsed[name]


def is_loaded(module: str) -> bool:
    """Whether a kernel module is loaded, or built into the kernel with settings of its own.

    An empty name is that of no module, of which nothing is needed.
    """
    return not module or (MODULES / module).is_dir()
