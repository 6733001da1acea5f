"""Tuners: pure functions over kvprobe.api that answer findings which exist."""

import ast
from pathlib import Path

import pytest

from kvprobe import content, registry

TUNERS = content.files("tuning", ".py")
PURE = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "kvprobe.api",
    "math",
    "operator",
    "statistics",
    "typing",
}
IMPURE_CALLS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, level=level):
                found.add("." * level + (module or ""))
    return found


def called(tree: ast.Module) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


@pytest.mark.parametrize("path", TUNERS.values(), ids=TUNERS.keys())
def test_a_tuner_does_no_io_and_imports_the_api_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) - PURE
    assert not called(tree) & IMPURE_CALLS


@pytest.mark.parametrize("name", TUNERS)
def test_a_tuner_answers_findings_that_exist(name: str) -> None:
    tuner = content.tuners()[name]
    assert tuner.answers
    assert not set(tuner.answers) - set(registry.names("kvprobe.findings"))


def test_impurity_is_seen() -> None:
    tree = ast.parse("import os.path\nfrom . import x\nfrom kvprobe.model import Tuner\nopen('x')")
    assert imported(tree) - PURE == {"os.path", ".", "kvprobe.model"}
    assert called(tree) & IMPURE_CALLS == {"open"}
