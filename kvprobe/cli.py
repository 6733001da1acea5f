"""The command line: parse, dispatch, turn errors into one line and an exit code.

Only here is anything decided about exiting. stdout carries the result, stderr the talk.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import NoReturn

from kvprobe import __version__, content, registry
from kvprobe.commands import Command
from kvprobe.errors import ExitCode, KvprobeError

DEBUG = "KVPROBE_DEBUG"
_VERBS = "kvprobe.commands"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are kvprobe's: one line and a hint."""

    def error(self, message: str) -> NoReturn:
        """Raise ``KvprobeError`` in place of printing the usage and exiting."""
        one_line = " ".join(message.split())
        raise KvprobeError(one_line, f"{self.prog} --help", ExitCode.USAGE)


def verbs() -> list[str]:
    """Names of all verbs, sorted; none is imported."""
    return registry.names(_VERBS)


def command(verb: str) -> Command:
    """The verb of that name; only its file is imported.

    Raises:
        KvprobeError: there is no such verb; the hint names the closest one.
    """
    known = verbs()
    if verb not in known:
        close = get_close_matches(verb, known, n=1)
        hint = "`kvprobe --help` lists all"
        raise KvprobeError(
            f"no verb {verb!r}", f"did you mean `kvprobe {close[0]}`? {hint}" if close else hint
        )
    return registry.load_one(_VERBS, verb, "COMMAND", Command)


def parser_of(chosen: Command) -> Parser:
    """The parser of one verb's own options."""
    summary = chosen.summary[0].upper() + chosen.summary[1:]
    parser = Parser(prog=f"kvprobe {chosen.name}", description=f"{summary}.", allow_abbrev=False)
    chosen.configure(parser)
    return parser


class _Help(argparse.Action):
    """``--help`` of the whole: the verbs are imported for their summaries only when it is asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(_help_text(parser), end="")
        parser.exit(ExitCode.OK)


def _help_text(parser: argparse.ArgumentParser) -> str:
    commands = registry.load(_VERBS, "COMMAND", Command)
    width = max(map(len, commands), default=0)
    lines = [f"  {name:{width}}  {chosen.summary}" for name, chosen in commands.items()]
    return "\n".join(
        [
            parser.format_help(),
            "verbs:",
            *lines,
            "",
            "`kvprobe VERB --help` describes one. Exit codes: 0 fine, 1 findings at or above",
            "--fail-on, 2 usage, 3 this machine cannot, 4 incomplete, 5 change failed and was",
            "rolled back, 6 change failed and was not, 70 defect in kvprobe, 130 interrupted.",
            "",
        ]
    )


def _top_parser() -> Parser:
    parser = Parser(
        prog="kvprobe",
        usage="kvprobe [--content DIR] VERB ...",
        description="Was reading the KV cache back from storage worth it, and where did the "
        "time go?",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this and exit")
    parser.add_argument("--version", action="version", version=f"kvprobe {__version__}")
    parser.add_argument(
        "--content",
        metavar="DIR",
        help="folder whose probes/, tuning/ and playbooks/ replace the shipped ones "
        f"(also: {content.ENVIRONMENT})",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The verb of a command line and its options; ``--content`` is put into the environment.

    Raises:
        KvprobeError: usage.
        SystemExit: the help or the version was asked for, and has been printed.
    """
    _refuse_empty_words(argv)
    options = _top_parser().parse_args(argv)
    if options.content is not None:
        os.environ[content.ENVIRONMENT] = options.content
    if not options.words:
        raise KvprobeError("no verb given", "`kvprobe --help` lists all")
    verb, *rest = options.words
    chosen = command(verb)
    return chosen, parser_of(chosen).parse_args(rest)


def _refuse_empty_words(words: Sequence[str]) -> None:
    """Refuse an empty value: the variable of a script was not set, and "" would be this folder.

    What comes after ``--`` is the command line of another program.
    """
    own = list(words[: words.index("--")] if "--" in words else words)
    for before, word in pairwise(("kvprobe", *own)):
        name = before if word == "" else word.removesuffix("=")
        if word == "" or (word.startswith("--") and word.endswith("=")):
            raise KvprobeError(
                f"the value after {name} is empty", "is a variable of the shell not set?"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a report
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KvprobeError as error:
        return _complain(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", "", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        _settle_stdout()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        _settle_stdout()
        where = f": {error.filename}" if error.filename else ""
        hint = f"{DEBUG}=1 shows where it happened"
        return _complain(f"{error.strerror or error}{where}", hint, ExitCode.UNSUPPORTED)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        hint = f"run it again with {DEBUG}=1 for the traceback and report it"
        return _complain(f"defect in kvprobe: {what}", hint, ExitCode.DEFECT)


def _dispatch(argv: Sequence[str]) -> int:
    try:
        chosen, options = parse(argv)
    except SystemExit as done:  # argparse has printed the help or the version
        return done.code if isinstance(done.code, int) else ExitCode.OK
    return int(chosen.run(options))


def _settle_stdout() -> None:
    """Write what is held back, or drop it for good: the interpreter must not fail on it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, hint: str, code: ExitCode) -> int:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    print(f"kvprobe: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code
