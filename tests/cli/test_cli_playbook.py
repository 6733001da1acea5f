"""``kvprobe playbook`` on folders of its own."""

import io
import json
from pathlib import Path

import pytest

from kvprobe import cli


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "slow_fan.md").write_text("# slow_fan\n\n## What it means\n\nThe fan is slow.\n")
    (folder / "hot_disk.md").write_text("# hot_disk\n\nThe disk is hot.\nVery hot.\n")
    (folder / "README.md").write_text("# playbooks\n")
    return tmp_path


def run(books: Path, *words: str) -> int:
    return cli.main(["--content", str(books), "playbook", *words])


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROBE_CONTENT", "")


def test_lists_all_with_their_first_line(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(books) == 0
    assert capsys.readouterr().out == "hot_disk  The disk is hot.\nslow_fan  The fan is slow.\n"


def test_shows_the_text_as_it_is_when_piped(
    books: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(books, "hot_disk") == 0
    assert capsys.readouterr().out == (books / "playbooks" / "hot_disk.md").read_text()


def test_renders_on_a_terminal(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    assert run(books, "hot_disk") == 0
    assert "hot_disk" in terminal.getvalue()
    assert "# hot_disk" not in terminal.getvalue()


def test_json(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(books, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema_version"] == 1
    assert listed["playbooks"][1] == {"slug": "slow_fan", "summary": "The fan is slow."}
    assert run(books, "slow_fan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("# slow_fan\n")


def test_an_unknown_slug_names_the_closest(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(books, "hot_disc") == 2
    assert capsys.readouterr().err == (
        "kvprobe: no playbook 'hot_disc'\n"
        "hint: did you mean hot_disk? `kvprobe playbook` lists all\n"
    )


def test_a_path_is_no_slug(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(books, "../playbooks/hot_disk") == 2
    assert "no playbook" in capsys.readouterr().err
