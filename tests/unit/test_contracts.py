"""House rules that no linter knows: sizes, names, exits, leftovers, folder notes, the lock file."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CODE = ("kvprobe", "tuning", "probes", "benchmarks")
SOURCES = sorted(
    (*ROOT.glob("*.py"), *(path for folder in CODE for path in (ROOT / folder).rglob("*.py")))
)
MODULE_LINES = 400
FUNCTION_LINES = 60
README_LINES = 60

# Written in two parts, so that this file does not contain what it looks for.
LEFTOVER = re.compile("TO" + "DO|FIX" + r"ME|\bXX" + r"X\b")
MACHINE = re.compile("/wo" + r"rk/(main|shared|\.)|/ro" + "ot/|/Us" + r"ers/|\.py" + "env")
VAGUE_MODULE = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)(_|$)")
VAGUE_CLASS = re.compile(r"(Utils?|Helpers?|Manager|Misc)$")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def tracked_texts() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_modules_and_functions_stay_small() -> None:
    large = []
    for path, tree in parsed():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MODULE_LINES:
            large.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    large.append(f"{relative(path)}:{node.lineno} {node.name}: {length} lines")
    assert SOURCES
    assert not large


def test_names_say_what_a_thing_is() -> None:
    vague = [relative(path) for path in SOURCES if VAGUE_MODULE.search(path.stem)]
    for path, tree in parsed():
        vague += [
            f"{relative(path)}: class {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
        ]
    assert not vague


def exits(node: ast.AST) -> Iterator[ast.AST]:
    """Exits of a module, but those of a script part and of a signal handler (128 + number)."""
    match node:
        case ast.If(test=test) if ast.unparse(test) == "__name__ == '__main__'":
            return  # the file is also run as a process of its own
        case ast.Raise(exc=ast.Call(args=[ast.BinOp(left=ast.Constant(128))])):
            return  # unwinds, then ends as the signal would have
        case ast.Attribute(value=ast.Name("sys"), attr="exit") | ast.Name("SystemExit"):
            yield node
    for child in ast.iter_child_nodes(node):
        yield from exits(child)


def test_only_the_command_line_exits() -> None:
    allowed = {"kvprobe/cli.py", "kvprobe/__main__.py"}
    found = [
        f"{relative(path)}: {ast.unparse(node)}"
        for path, tree in parsed()
        if relative(path).startswith("kvprobe/") and relative(path) not in allowed
        for node in exits(tree)
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f():\n    sys.exit(1)", 1),
        ("def f():\n    raise SystemExit(2)", 1),
        ("def f(n):\n    raise SystemExit(128 + n)", 0),
        ("if __name__ == '__main__':\n    sys.exit(0)", 0),
    ],
)
def test_exits_are_seen(text: str, count: int) -> None:
    assert len(list(exits(ast.parse(text)))) == count


@pytest.mark.parametrize("pattern", [LEFTOVER, MACHINE], ids=["leftovers", "paths of a machine"])
def test_nothing_is_left_in_tracked_files(pattern: re.Pattern[str]) -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()[:80]}"
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_each_folder_says_what_it_is_on_one_page() -> None:
    parts = [path.parent for path in (ROOT / "kvprobe").glob("*/__init__.py")]
    folders = [ROOT / name for name in (*CODE[1:], "playbooks", "tests", "docs")]
    wrong = []
    for folder in sorted(parts) + folders:
        note = folder / "README.md"
        if not note.is_file():
            wrong.append(f"{relative(folder)}: no README.md")
        elif len(note.read_text(encoding="utf-8").splitlines()) > README_LINES:
            wrong.append(f"{relative(folder)}: README.md is longer than a page")
    assert not wrong


def test_kernel_code_states_its_license() -> None:
    """The kernel refuses GPL-only functions to a program whose license is not compatible."""
    sources = sorted((*(ROOT / "probes").rglob("*.c"), *(ROOT / "probes").rglob("*.h")))
    unmarked = []
    for path in sources:
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        if not re.search(r"SPDX-License-Identifier: .*GPL-2\.0", first):
            unmarked.append(relative(path))
    assert not unmarked


def test_the_lock_satisfies_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", lock, re.MULTILINE))
    unmet = []
    for line in wanted:
        requirement = Requirement(line)
        version = locked.get(requirement.name)
        if version is None or not requirement.specifier.contains(version):
            unmet.append(f"{line}: locked is {version}; run `make lock`")
    assert not unmet
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", lock)) >= len(locked)
