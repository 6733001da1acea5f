"""Playbooks: one for each detector, all of one form, with commands that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprobe import cli, content, registry
from kvprobe.errors import KvprobeError

ROOT = Path(__file__).parents[2]
SECTIONS = ["What it means", "Check", "Fix", "Prove it", "Undo"]
SLUGS = sorted(content.files("playbooks", ".md"))
PAGES = sorted(
    path
    for path in (ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("kvprobe/*/README.md"))
    if ".venv" not in path.parts
)


def fenced_lines(text: str) -> Iterator[str]:
    """Lines of shell blocks, continued lines joined."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash", "console", "shell"):
            yield from block.replace("\\\n", " ").splitlines()


def kvprobe_commands(text: str) -> list[list[str]]:
    """The words after ``kvprobe`` of every command in a shell block, up to a pipe or the like."""
    found = []
    for line in fenced_lines(text):
        line = re.sub(r"\$\([^)]*\)|\$\{?\w+\}?", "1", line)
        words = shlex.split(line, comments=True)
        while words and (words[0] in ("$", "#", "sudo", "time") or "=" in words[0]):
            words.pop(0)
        if words and words[0] == "kvprobe":
            found.append(_until_next_command(words[1:]))
    return found


def _until_next_command(words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if re.fullmatch(r"\|\|?|&&?|;|\d?>.*|<.*", word):
            return words[:place]
    return words


def complaint(words: list[str]) -> str | None:
    """What the real argument parser says against a command; a word in capitals may be a number."""
    numbers = [re.sub(r"^[A-Z][A-Z_]*$", "1", word) for word in words]
    said = None
    for variant in (words, numbers):
        try:
            cli.parse(variant)
        except KvprobeError as error:
            said = f"kvprobe {' '.join(words)}: {error.message}"
        except SystemExit:  # --help
            return None
        else:
            return None
    return said


def test_each_detector_has_a_playbook_and_each_playbook_a_detector() -> None:
    assert registry.names("kvprobe.findings") == SLUGS


@pytest.mark.parametrize("slug", SLUGS)
def test_title_and_sections(slug: str) -> None:
    text = re.sub(r"^```.*?^```", "", content.playbook(slug), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^# (.+)$", text, re.MULTILINE) == [slug]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert section.strip(), "a section without prose"


@pytest.mark.parametrize("slug", SLUGS)
def test_commands_of_a_playbook_exist(slug: str) -> None:
    commands = kvprobe_commands(content.playbook(slug))
    assert commands, "a playbook without a command cannot prove anything"
    assert not [said for words in commands if (said := complaint(words))]


@pytest.mark.parametrize("slug", SLUGS)
def test_what_is_written_can_be_undone(slug: str) -> None:
    """What Fix writes is read there first; Undo writes the noted value, never one of its own."""
    text = content.playbook(slug)
    fix, undo = (list(fenced_lines(text.split(f"## {name}\n")[1])) for name in ("Fix", "Undo"))
    fix = fix[: len(fix) - len(undo)]
    for line in undo:
        assert "tee" not in line or line.startswith("echo VALUE |"), line
    for place, line in enumerate(fix):
        if written := re.fullmatch(r"echo \S+ \| sudo tee (/\S+)", line):
            assert any(written[1] in before for before in fix[:place]), "not read before"
            assert f"echo VALUE | sudo tee {written[1]}" in undo


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_readme_exist(page: Path) -> None:
    commands = kvprobe_commands(page.read_text(encoding="utf-8"))
    assert not [said for words in commands if (said := complaint(words))]


def test_the_reader_of_commands_finds_them() -> None:
    text = (
        "```sh\n$ sudo kvprobe playbook \\\n  hot_disk | less  # why\n"
        "KVPROBE_DEBUG=1 kvprobe nothing\nfio --name=x\n```\n```json\nkvprobe {\n```\n"
    )
    assert kvprobe_commands(text) == [["playbook", "hot_disk"], ["nothing"]]
    assert complaint(["playbook", "hot_disk"]) is None
    assert complaint(["playbook", "--nothing"]) == (
        "kvprobe playbook --nothing: unrecognized arguments: --nothing"
    )
    assert complaint(["nothing"]) == "kvprobe nothing: no verb 'nothing'"
