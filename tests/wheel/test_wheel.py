"""The wheel, built from the checkout and installed apart from it."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from kvprobe import __version__

ROOT = Path(__file__).parents[2]
CONTENT = {
    "probes": ("*.bpf.c", "*.h", "*.toml"),
    "tuning": ("[a-z]*.py",),
    "playbooks": ("[a-z]*.md",),
}
ASK = """
import json
from kvprobe import content
print(json.dumps({
    "folders": [str(content.directory(kind)) for kind in ("probes", "tuning", "playbooks")],
    "tuners": sorted(content.tuners()),
    "playbooks": sorted(content.playbooks()),
}))
"""


def build(out: Path, **environment: str) -> tuple[Path, str]:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, done.stderr


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def in_checkout() -> set[str]:
    return {
        f"{kind}/{path.name}"
        for kind, patterns in CONTENT.items()
        for pattern in patterns
        for path in (ROOT / kind).glob(pattern)
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and, by path, the libraries it needs."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=110)
    (packages,) = (home / "lib").glob("python*/site-packages")
    libraries = [path for path in site.getsitepackages() if path != str(packages)]
    (packages / "libraries.pth").write_text("\n".join(libraries))  # without their own .pth files
    return home / "bin"


def test_holds_kvprobe_with_its_content_and_nothing_else(wheel: Path) -> None:
    names = members(wheel)
    assert {name.split("/")[0] for name in names} == {
        "kvprobe",
        f"kvprobe-{__version__}.dist-info",
    }
    prefix = "kvprobe/_content/"
    shipped = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    assert {name for name in shipped if not name.endswith(".o")} == in_checkout()
    assert not [name for name in names if name.endswith((".pyc", "README.md"))]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "kvprobe").rglob("*.py")}
    assert modules <= names


def test_carries_both_licenses(wheel: Path) -> None:
    licenses = {Path(name).name for name in members(wheel) if "/licenses/" in name}
    assert licenses == {"LICENSE"}
    assert sum("/licenses/" in name for name in members(wheel)) == 2


def test_carries_the_compiled_probes(wheel: Path) -> None:
    if shutil.which("clang") is None:
        pytest.skip("no clang")
    objects = [name for name in members(wheel) if name.endswith(".o")]
    assert {Path(name).name for name in objects} == {"kvprobe.bpf.o", "kvprobe-plain.bpf.o"}
    with zipfile.ZipFile(wheel) as archive:
        for name in objects:
            assert archive.read(name)[:4] == b"\x7fELF"


def test_builds_without_clang_and_says_so_in_one_line(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, PATH="/nonexistent")
    assert not [name for name in members(wheel) if name.endswith(".o")]
    (line,) = [line for line in said.splitlines() if line != str(wheel)]
    assert line.startswith("no clang: ")


def test_works_from_any_folder(installed: Path, tmp_path: Path) -> None:
    version = subprocess.check_output([installed / "kvprobe", "--version"], cwd=tmp_path, text=True)
    assert version == f"kvprobe {__version__}\n"
    told = subprocess.check_output(
        [installed / "kvprobe", "playbook"], cwd=tmp_path, text=True, stderr=subprocess.DEVNULL
    )
    assert len(told.splitlines()) == sum(name.startswith("playbooks/") for name in in_checkout())


def test_uses_its_own_content_even_beside_a_folder_called_tuning(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "__init__.py").write_text("raise SystemError('shadowed')")
    done = subprocess.run(
        [installed / "python", "-c", ASK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert all(str(installed.parent) in folder for folder in answer["folders"])
    assert all("/kvprobe/_content/" in folder for folder in answer["folders"])
    for kind, suffix in (("tuning", ".py"), ("playbooks", ".md")):
        stems = {Path(n).stem for n in in_checkout() if n.startswith(kind) and n.endswith(suffix)}
        assert set(answer["tuners" if kind == "tuning" else "playbooks"]) == stems
