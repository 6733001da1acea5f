"""``kvprobe engines``: every engine that is known, how it is heard, whether it is found."""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvprobe.commands import Command
from kvprobe.errors import ExitCode

if TYPE_CHECKING:
    from kvprobe.adapter import Engine
    from kvprobe.commands._terminal import Style

SCHEMA_VERSION = 1


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _run(options: Namespace) -> int:
    from kvprobe import engines
    from kvprobe.commands._terminal import Style

    known = list(engines.engines().values())
    if options.json:
        listed = [_as_json(engine) for engine in known]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "engines": listed}))
    else:
        style = Style.of(sys.stdout)
        name_width = max((len(engine.name) for engine in known), default=0)
        for engine in known:
            print(_entry(engine, name_width, style, wrapped=sys.stdout.isatty()))
    return ExitCode.OK


def _as_json(engine: Engine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "summary": engine.summary,
        "has_files": engine.describes_files,
        "can_be_detected": engine.detect is not None,
        "signals": list(_signals(engine)),
    }


def _signals(engine: Engine) -> tuple[str, ...]:
    """Kinds of places as ``--signal`` has them; ``events`` where the format is kvprobe's own."""
    from kvprobe.signals import places

    kinds = places.kinds_of(engine)
    return kinds if engine.describes_files else (places.EVENTS, *kinds)


def _entry(engine: Engine, name_width: int, style: Style, *, wrapped: bool) -> str:
    """One line, or set to the terminal's width under the name."""
    signals = ", ".join(_signals(engine))
    heard = f"heard by {signals}" if signals else "no signals of its own"
    found = "found when it runs" if engine.detect else "not found by itself"
    text = f"{engine.summary}; {heard}; {found}"
    indent = " " * (name_width + 2)
    lines = textwrap.wrap(text, style.width - len(indent)) if wrapped else [text]
    name = style.bold(engine.name) + " " * (len(indent) - len(engine.name))
    return name + f"\n{indent}".join(lines)


COMMAND = Command(
    "engines", "list the engines that are known and how each is heard", _configure, _run
)
