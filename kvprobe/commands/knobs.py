"""``kvprobe knobs``: the settings of the storage path, where they are, what a change takes."""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvprobe.commands import Command
from kvprobe.errors import ExitCode
from kvprobe.units import UNKNOWN

if TYPE_CHECKING:
    from kvprobe.commands._terminal import Style
    from kvprobe.knobs import Setting

SCHEMA_VERSION = 1
_FAMILIES = ("block_size", "queue_depth", "prefetch")
_VALUE_WIDTH = 22
_NO_LIMIT = {"max_hw_sectors_kb": str(0xFFFFFFFF >> 1), "max_segment_size": str(0xFFFFFFFF)}
"""What the kernel shows where a driver sets no limit: the largest number of its type."""
_REACH_WIDTH = 14


def _configure(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--path", metavar="DIR", help="only of what serves this folder, or of this /dev/NAME"
    )
    what.add_argument("--device", metavar="NAME", help="only of this disk and what it lies on")
    parser.add_argument("--family", choices=_FAMILIES, help="only those about this")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _run(options: Namespace) -> int:
    from kvprobe import knobs
    from kvprobe.commands._terminal import Style

    if options.path is not None:
        subjects = knobs.of_path(options.path)
    elif options.device is not None:
        subjects = knobs.of_device(options.device)
    else:
        subjects = knobs.of_host()
    family = None if options.family is None else knobs.Family(options.family)
    found = knobs.read_all(subjects, family)
    if options.json:
        print(json.dumps(document(found)))
    else:
        for line in lines(found, Style.of(sys.stdout)):
            print(line)
    return ExitCode.OK


def document(found: Sequence[Setting]) -> dict[str, Any]:
    """Every setting with all that the catalogue says of it."""
    from kvprobe import knobs

    return {
        "schema_version": SCHEMA_VERSION,
        "knobs": [
            {
                **knobs.as_row(each),
                "meaning": each.knob.meaning,
                "default": each.knob.default,
                "allowed": each.allowed,
                "ignored": each.knob.ignored,
                "risk": each.knob.risk,
                "undo": each.knob.undo,
            }
            for each in found
        ],
    }


def lines(found: Sequence[Setting], style: Style) -> Iterator[str]:
    """A table for each family; subjects with the same value share a row."""
    if not found:
        yield "no setting is known for this"
    for family, members in groupby(found, key=lambda each: each.knob.family):
        yield style.bold(family.value)
        by_name = sorted(members, key=lambda each: each.knob.name)
        name_width = max(len(each.knob.name) for each in by_name)
        said: set[str] = set()
        for _, same in groupby(by_name, key=lambda each: each.knob.name):
            yield from _of_one_knob(list(same), name_width, said, style)
        yield ""


def _of_one_knob(
    found: list[Setting], name_width: int, said: set[str], style: Style
) -> Iterator[str]:
    """The rows of one knob; what was ``said`` of another one before is not said again."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        key = (_value(each), each.reach.value.replace("_", " "), each.note)
        rows.setdefault(key, []).append(each.subject)
    for (value, reach, note), subjects in rows.items():
        row = f"  {found[0].knob.name:{name_width}}  {value:{_VALUE_WIDTH}} {reach:{_REACH_WIDTH}}"
        yield f"{row} {', '.join(subjects)}"
        yield from _indented(note, style)
    beware = found[0].knob.ignored
    if beware not in said and any(each.reach.value != "read_only" for each in found):
        said.add(beware)
        yield from _indented(f"beware: {beware}" if beware else "", style)


def _value(each: Setting) -> str:
    if each.value is None:
        return UNKNOWN
    if each.value == _NO_LIMIT.get(each.knob.name):
        return "no limit"
    is_number = each.value.lstrip("-").split(" ", 1)[0].isdecimal()
    return f"{each.value} {each.knob.unit}".rstrip() if is_number else each.value


def _indented(text: str, style: Style) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, style.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


COMMAND = Command(
    "knobs",
    "list the settings of the storage path and what a change of each takes",
    _configure,
    _run,
)
