"""``kvprobe playbook [SLUG]``: what a person does about a finding."""

import json
import sys
from argparse import ArgumentParser, Namespace

from kvprobe import content
from kvprobe.commands import Command
from kvprobe.errors import ExitCode

SCHEMA_VERSION = 1


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "slug", metavar="SLUG", nargs="?", help="a finding's slug; without it all are listed"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _run(options: Namespace) -> int:
    if options.slug is None:
        _print_list(options.json)
    else:
        _print_one(options.slug, options.json)
    return ExitCode.OK


def _print_list(as_json: bool) -> None:
    summaries = {slug: first_line(text) for slug, text in content.playbooks().items()}
    if as_json:
        listed = [{"slug": slug, "summary": line} for slug, line in summaries.items()]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "playbooks": listed}))
        return
    width = max(map(len, summaries), default=0)
    for slug, line in summaries.items():
        print(f"{slug:{width}}  {line}")
    print("`kvprobe playbook SLUG` shows one", file=sys.stderr)


def _print_one(slug: str, as_json: bool) -> None:
    text = content.playbook(slug)
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "slug": slug, "text": text}))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)


def first_line(text: str) -> str:
    """The first line of a playbook that is prose: neither blank nor a heading."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


COMMAND = Command("playbook", "what to do about a finding", _configure, _run)
