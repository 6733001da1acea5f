"""One file exports one object: the seam by which verbs, engines, detectors and reports are found.

Adding one is adding a file; nothing is listed a second time.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from kvprobe.errors import ExitCode, KvprobeError

T = TypeVar("T")


def names(package: str) -> list[str]:
    """Stems of the files in a package, sorted, those with a leading underscore left out.

    Nothing but the package itself is imported.

    Raises:
        KvprobeError: ``package`` is a plain module.
    """
    path = getattr(import_module(package), "__path__", None)
    if path is None:
        raise KvprobeError(f"{package} is not a package", exit_code=ExitCode.UNSUPPORTED)
    return sorted(m.name for m in iter_modules(path) if not m.name.startswith("_"))


def load_one(package: str, name: str, attribute: str, kind: type[T]) -> T:
    """Import one file of a package and return what it exports as ``attribute``.

    Raises:
        KvprobeError: the file needs something that is not installed, or does not export a
            ``kind`` under that name.
    """
    where = f"{package}.{name}"
    try:
        module = import_module(where)
    except ImportError as error:
        raise KvprobeError(
            f"{where} cannot be loaded: {error}",
            "reinstall kvprobe: a part of it or of what it needs is missing",
            ExitCode.UNSUPPORTED,
        ) from error
    value = getattr(module, attribute, None)
    if not isinstance(value, kind):
        raise KvprobeError(
            f"{where} exports no {attribute} of type {kind.__name__}",
            f"each file of {package} exports one {attribute}; "
            "helpers have a leading underscore in their names",
            ExitCode.UNSUPPORTED,
        )
    return value


def load(package: str, attribute: str, kind: type[T]) -> dict[str, T]:
    """What every file of a package exports as ``attribute``, by file stem, in order of names.

    Raises:
        KvprobeError: see ``load_one``.
    """
    return {name: load_one(package, name, attribute, kind) for name in names(package)}
