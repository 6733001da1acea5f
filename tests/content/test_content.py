"""Finding and loading the content folders, and what root refuses to load."""

import os
from pathlib import Path

import pytest

from kvprobe import content
from kvprobe.errors import KvprobeError

TUNER = """
from dataclasses import dataclass
from kvprobe.api import Tuner

@dataclass(frozen=True)
class Local:
    x: "int"

def propose(findings, facts):
    return []

TUNER = Tuner(name={name!r}, answers=("slow_fan",), propose=propose)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An override folder with one tuner and one playbook."""
    (tmp_path / "tuning").mkdir(mode=0o755)
    (tmp_path / "playbooks").mkdir(mode=0o755)
    write(tmp_path / "tuning" / "fan.py", TUNER.format(name="fan"))
    write(tmp_path / "playbooks" / "slow_fan.md", "# slow_fan\n")
    monkeypatch.setenv(content.ENVIRONMENT, str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)


def test_the_override_wins_and_what_it_lacks_is_the_shipped(root: Path) -> None:
    assert content.directory("tuning") == root / "tuning"
    assert content.directory("probes") == Path(content.__file__).parents[1] / "probes"


def test_a_missing_override_or_kind_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvprobeError, match="no recipes folder in this installation"):
        content.directory("recipes")
    monkeypatch.setenv(content.ENVIRONMENT, str(tmp_path / "gone"))
    with pytest.raises(KvprobeError, match="no content folder at"):
        content.directory("tuning")


def test_only_snake_case_stems_are_content(root: Path) -> None:
    for name in ("README.md", "_draft.md", "two.parts.md", "UPPER.md"):
        write(root / "playbooks" / name, "")
    assert content.playbooks() == {"slow_fan": "# slow_fan\n"}
    assert list(content.files("tuning", ".py")) == ["fan"]


def test_loads_tuners_by_path(root: Path) -> None:
    (tuner,) = content.tuners().values()
    assert (tuner.name, tuner.answers) == ("fan", ("slow_fan",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = x / 0\n", r"does not run: ZeroDivisionError: .* \(line 2\)$"),
        ("def broken(:\n", r"does not run: SyntaxError: .*line 1"),
        ("import no_such_library\n", r"does not run: ModuleNotFoundError: .* \(line 1\)$"),
        ("TUNER = 3\n", r"exports no TUNER of the name fan"),
        (TUNER.format(name="other"), r"exports no TUNER of the name fan"),
    ],
)
def test_a_bad_tuner_is_named_with_the_line(root: Path, text: str, message: str) -> None:
    write(root / "tuning" / "fan.py", text)
    with pytest.raises(KvprobeError, match=message) as caught:
        content.tuners()
    assert str(root / "tuning" / "fan.py") in caught.value.message
    assert "\n" not in caught.value.message


def test_a_playbook_that_is_not_text_is_an_error(root: Path) -> None:
    (root / "playbooks" / "slow_fan.md").write_bytes(b"\xff\xfe")
    with pytest.raises(KvprobeError, match="is not UTF-8 text"):
        content.playbook("slow_fan")


@pytest.mark.root
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize(
    ("mode", "owner", "group", "refused"),
    [
        (0o644, 0, 0, ""),
        (0o664, 0, 0, ""),
        (0o646, 0, 0, "is writable by everyone"),
        (0o664, 0, 12345, "is writable by group 12345"),
        (0o644, 12345, 0, "is owned by user 12345"),
    ],
)
def test_root_refuses_what_others_could_have_written(
    root: Path, what: str, mode: int, owner: int, group: int, refused: str
) -> None:
    file = root / "tuning" / "fan.py"
    place = file if what == "file" else file.parent
    os.chown(place, owner, group)
    place.chmod(mode if what == "file" else mode | 0o111)
    if not refused:
        assert "fan" in content.tuners()
        return
    with pytest.raises(KvprobeError) as caught:
        content.tuners()
    assert caught.value.message == f"root does not run {file}: {place} {refused}"
    assert str(place) in caught.value.hint


@pytest.mark.root
def test_root_trusts_who_could_change_the_code_as_well(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "kvprobe"
    code.mkdir()
    monkeypatch.setattr(content, "_HERE", code)
    for place in (code, root / "tuning", root / "tuning" / "fan.py"):
        os.chown(place, 12345, 12345)
    assert "fan" in content.tuners()
    os.chown(code, 0, 0)
    with pytest.raises(KvprobeError, match="is owned by user 12345"):
        content.tuners()


@pytest.mark.root
def test_root_follows_a_link_to_where_it_leads(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    write(elsewhere / "fan.py", TUNER.format(name="fan"))
    (root / "tuning" / "fan.py").unlink()
    (root / "tuning" / "fan.py").symlink_to(elsewhere / "fan.py")
    with pytest.raises(KvprobeError, match="elsewhere is writable by everyone"):
        content.tuners()


def test_a_dangling_link_is_one_line(root: Path) -> None:
    (root / "playbooks" / "gone.md").symlink_to(root / "nothing")
    with pytest.raises(KvprobeError, match=r"cannot read .*gone\.md: No such file"):
        content.playbooks()


def test_other_users_may_load_what_they_like(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "tuning" / "fan.py").chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "fan" in content.tuners()
