"""The types of the running kernel and of the modules that it has loaded, asked as one.

Like libbpf, kvprobe takes a structure from the kernel itself where it has one of that name, and
looks into the modules only where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from kvprobe.bpf.btf import VMLINUX, Btf, Field
from kvprobe.errors import ExitCode, KvprobeError

MODULES = Path("/sys/module")
_T = TypeVar("_T")


class KernelTypes:
    """Answers of a kernel's BTF, and of the BTF of some modules on top of it.

    Args:
        kernel: the image of the kernel itself.
        modules: names of modules; those that are not loaded know nothing.
    """

    def __init__(self, kernel: Btf, modules: Iterable[str] = ()) -> None:
        self._kernel = kernel
        self._names = tuple(modules)

    def field(self, struct_name: str, path: str) -> Field | None:
        """Where a member is (see ``Btf.field``); None where there is none.

        Raises:
            KvprobeError: two modules have structures of that name, and place it differently.
        """
        if self._kernel.size(struct_name) is not None:
            return self._kernel.field(struct_name, path)
        answers = (btf.field(struct_name, path) for btf in self._modules)
        places = {place for place in answers if place is not None}
        if len(places) > 1:
            raise KvprobeError(
                f"kernel modules disagree where {struct_name}.{path} is",
                "use a probe that names another field",
                ExitCode.UNSUPPORTED,
            )
        return places.pop() if places else None

    def size(self, struct_name: str) -> int | None:
        """Bytes of a structure or union; None where there is none of that name."""
        return self._first(lambda btf: btf.size(struct_name))

    def enumerator(self, name: str) -> int | None:
        """Value of an enumerator; None where there is none of that name."""
        return self._first(lambda btf: btf.enumerator(name))

    def tracepoint_args(self, name: str) -> int | None:
        """How many arguments a raw tracepoint passes; None where there is no such tracepoint."""
        return self._first(lambda btf: btf.tracepoint_args(name))

    @cached_property
    def _modules(self) -> tuple[Btf, ...]:
        paths = (VMLINUX.with_name(name) for name in self._names)
        return tuple(Btf.load(path, self._kernel) for path in paths if path.exists())

    def _first(self, ask: Callable[[Btf], _T | None]) -> _T | None:
        answer = ask(self._kernel)
        if answer is not None:
            return answer
        return next((found for btf in self._modules if (found := ask(btf)) is not None), None)


def is_loaded(module: str) -> bool:
    """Whether a kernel module is loaded, or built into the kernel with settings of its own."""
    return (MODULES / module).is_dir()
