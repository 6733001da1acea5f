"""The command line as a shell sees it: one line per error, exit codes, streams."""

import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprobe import __version__, cli, registry
from kvprobe.commands import Command
from kvprobe.errors import ExitCode, KvprobeError

Verb = Callable[..., None]

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""An environment in which Python keeps output back until the end, as it does by default."""


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvprobe", *words],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Makes ``kvprobe probe-me`` run a function; ``parse`` adds its options."""

    def install(
        run: Callable[[Namespace], int], parse: Callable[[ArgumentParser], None] = lambda _: None
    ) -> None:
        chosen = Command("example", "An example", parse, run)
        monkeypatch.setattr(cli, "verbs", lambda: ["example"])
        monkeypatch.setattr(registry, "load_one", lambda *_: chosen)
        monkeypatch.delenv(cli.DEBUG, raising=False)

    return install


def fail(error: BaseException) -> Callable[[Namespace], int]:
    def run(_: Namespace) -> int:
        raise error

    return run


def test_help_lists_every_verb_with_its_summary() -> None:
    done = shell("--help")
    assert done.returncode == 0
    assert not done.stderr
    text = done.stdout.decode()
    for name in cli.verbs():
        assert f"  {name} " in text
        assert cli.command(name).summary in text


def test_version() -> None:
    done = shell("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"kvprobe {__version__}\n")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((), "no verb given", "`kvprobe --help`"),
        (("--bogus",), "unrecognized arguments: --bogus", "kvprobe --help"),
        (("playbok",), "no verb 'playbok'", "did you mean `kvprobe playbook`?"),
        (("playbook", "--nonsense"), "unrecognized arguments", "kvprobe playbook --help"),
        (("--content", "/nowhere", "playbook"), "no content folder at /nowhere", "--content"),
        (("doctor", "--path", ""), "the value after --path is empty", "variable of the shell"),
        (("knobs", "--path="), "the value after --path is empty", "variable of the shell"),
        (("sweep", "", "--direct"), "the value after sweep is empty", "variable of the shell"),
        (("--content", "", "doctor"), "the value after --content is empty", "variable"),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(
    words: tuple[str, ...], message: str, hint: str
) -> None:
    done = shell(*words)
    assert done.returncode == ExitCode.USAGE
    assert not done.stdout
    first, second = done.stderr.decode().splitlines()
    assert first.startswith("kvprobe: ") and message in first
    assert second.startswith("hint: ") and hint in second


def test_words_of_another_program_may_be_empty() -> None:
    _, options = cli.parse(["capture", "-d", "1", "--", "sh", "-c", "", "--x="])
    assert options.command == ["sh", "-c", "", "--x="]


def test_options_of_a_verb_reach_it_and_its_code_comes_back(verb: Verb) -> None:
    seen = []

    def run(options: Namespace) -> int:
        seen.append(options.depth)
        return ExitCode.FINDINGS

    verb(run, lambda parser: parser.add_argument("--depth", type=int) and None)
    assert cli.main(["example", "--depth", "7"]) == 1
    assert seen == [7]


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (
            KvprobeError("no BTF at /sys", "use another kernel", ExitCode.UNSUPPORTED),
            3,
            ["kvprobe: no BTF at /sys", "hint: use another kernel"],
        ),
        (KvprobeError("bad"), 2, ["kvprobe: bad"]),
        (KeyboardInterrupt(), 130, ["kvprobe: interrupted"]),
        (
            OSError(28, "No space left on device", "/x"),
            3,
            ["kvprobe: No space left on device: /x", "hint: KVPROBE_DEBUG=1 shows where"],
        ),
        (
            ZeroDivisionError("a\nb"),
            70,
            ["kvprobe: defect in kvprobe: ZeroDivisionError: a b", "hint: run it again with KV"],
        ),
    ],
)
def test_errors_become_one_line_and_a_code(
    verb: Verb,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    lines: list[str],
) -> None:
    verb(fail(error))
    assert cli.main(["example"]) == code
    out, err = capsys.readouterr()
    assert not out
    shown = err.splitlines()
    assert len(shown) == len(lines)
    assert all(line.startswith(start) for line, start in zip(shown, lines, strict=True))


def test_debug_adds_the_traceback(
    verb: Verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(fail(ZeroDivisionError("x")))
    monkeypatch.setenv(cli.DEBUG, "1")
    assert cli.main(["example"]) == ExitCode.DEFECT
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=BUFFERED,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (ExitCode.BROKEN_PIPE, b"")


def test_a_full_device_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvprobe", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=BUFFERED,
            timeout=60,
            check=False,
        )
    assert done.returncode == ExitCode.UNSUPPORTED
    assert done.stderr.decode().splitlines()[0] == "kvprobe: No space left on device"


def test_a_terminal_without_utf8_gets_replacements(tmp_path: Path) -> None:
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "demo.md").write_text("# demo\n\n12 µs → 3\n", encoding="utf-8")
    done = shell("--content", str(tmp_path), "playbook", "demo", PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"# demo\n\n12 ?s ? 3\n", b"")


def test_every_verb_is_named_as_its_file_and_has_help() -> None:
    for name in cli.verbs():
        chosen = cli.command(name)
        assert chosen.name == name
        assert re.fullmatch(r"[a-z][^\n]*[^.\n]", chosen.summary)
        assert cli.parser_of(chosen).format_help().startswith(f"usage: kvprobe {name}")
