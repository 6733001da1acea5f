"""One file exports one object."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe import registry
from kvprobe.errors import ExitCode, KvprobeError

Make = Callable[[dict[str, str]], str]
_serial = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an importable package of the given files and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(files: dict[str, str]) -> str:
        name = f"registry_example_{next(_serial)}"
        (tmp_path / name).mkdir()
        for stem, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{stem}.py").write_text(text)
        return name

    return make


def test_loads_each_file_by_its_stem_and_skips_underscores(package: Make) -> None:
    name = package({"b": "THING = 3", "a": "THING = 2", "_c": "raise SystemError"})
    assert registry.load(name, "THING", int) == {"a": 2, "b": 3}
    assert registry.load_one(name, "b", "THING", int) == 3


def test_names_imports_no_file(package: Make) -> None:
    assert registry.names(package({"b": "raise SystemError", "a": ""})) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "THING = 'two'", "THINGS = 2"])
def test_a_file_without_the_object_is_refused(package: Make, text: str) -> None:
    name = package({"a": text})
    with pytest.raises(KvprobeError, match=rf"{name}\.a exports no THING of type int"):
        registry.load(name, "THING", int)


def test_a_missing_library_is_this_machine_cannot(package: Make) -> None:
    name = package({"a": "import no_such_library"})
    with pytest.raises(KvprobeError, match="no_such_library") as caught:
        registry.load(name, "THING", int)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED


def test_a_plain_module_is_no_package() -> None:
    with pytest.raises(KvprobeError, match=r"kvprobe\.errors is not a package"):
        registry.names("kvprobe.errors")
