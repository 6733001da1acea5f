"""``kvprobe report``: the ledger, break-even, findings and proposals of one capture."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvprobe import registry
from kvprobe.commands import Command
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import ServiceCell

_FORMATS = "kvprobe.reports"
_PLAIN_WIDTH = 100


def configure(parser: ArgumentParser) -> None:
    """Add the options of ``kvprobe report``."""
    parser.add_argument("capture", metavar="FILE", help="a capture made by `kvprobe capture`")
    parser.add_argument(
        "--format", choices=registry.names(_FORMATS), default="text", help="default: text"
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="same as --format json"
    )
    parser.add_argument(
        "--requests",
        metavar="all|N|ID",
        default="10",
        help="all requests, the N that lost most (default: 10), or one request's whole story "
        "(id:ID where the id is a number)",
    )
    parser.add_argument(
        "--summary", action="store_true", help="the first screen of the text report only"
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="write there instead of to stdout")
    parser.add_argument(
        "--fail-on",
        choices=("info", "warning", "critical"),
        help="exit with 1 when there is a finding of this severity or above",
    )
    parser.add_argument(
        "--width", type=_width, metavar="N", help="columns of the text report, 80 to 200"
    )
    parser.add_argument(
        "--sweep",
        metavar="FILE",
        nargs="+",
        default=[],
        help="cells that `kvprobe sweep` measured on the same storage (JSON), for the proposals",
    )


def run(options: Namespace) -> int:
    """Print the report; 1 on findings at or above ``--fail-on``, else 4 on a cut-off capture."""
    from kvprobe import document
    from kvprobe.capture.reader import open_capture
    from kvprobe.reports import Report

    report = registry.load_one(_FORMATS, options.format, "REPORT", Report)
    sweeps = [cell for path in options.sweep for cell in read_sweep(path)]
    with open_capture(options.capture) as capture:
        found = document.build(capture, sweeps=sweeps)
    text = report.render(
        found,
        source=options.capture,
        requests=options.requests,
        summary=options.summary,
        **_terminal(options),
    )
    if options.output is None:
        sys.stdout.write(text)
    else:
        _write(options.output, text, options.capture)
    return _exit_code(found, options.fail_on)


def _exit_code(found: Mapping[str, Any], fail_on: str | None) -> ExitCode:
    from kvprobe import digest

    if fail_on and digest.worst_severity(found) >= digest.SEVERITIES.index(fail_on):
        return ExitCode.FINDINGS
    complete = digest.pick(found, "capture", "complete")
    return ExitCode.OK if complete is True else ExitCode.INCOMPLETE


def _terminal(options: Namespace) -> dict[str, Any]:
    """Width, colour and characters that suit where the text goes."""
    terminal = options.output is None and sys.stdout.isatty()
    width = options.width or (
        shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns if terminal else _PLAIN_WIDTH
    )
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = sys.stdout.encoding if options.output is None else "utf-8"
    return {"width": width, "color": color, "ascii_only": not _can_draw(encoding)}


def _can_draw(encoding: str | None) -> bool:
    try:
        "█░├●µ→\N{EN DASH}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _write(output: str, text: str, capture: str) -> None:
    """Write the report, whole or not at all, and say where it is."""
    path = Path(output)
    if path.exists() and Path(capture).exists() and path.samefile(capture):
        raise KvprobeError(f"{output} is the capture itself", "name another file with --output")
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise KvprobeError(
            f"cannot write {output}: {error.strerror}", "name a writable place with --output"
        ) from error
    print(f"report written to {output}", file=sys.stderr)


def read_sweep(path: str) -> list[ServiceCell]:
    """The cells of a sweep file: a JSON list, or an object with that list as ``cells``.

    Raises:
        KvprobeError: unreadable, no JSON, or a cell lacks a figure.
    """
    hint = "a sweep file is made by `kvprobe sweep` and holds a list of cells"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KvprobeError(f"cannot read sweep {path}: {error.strerror}", hint) from error
    except ValueError as error:
        raise KvprobeError(f"sweep {path} is no JSON", hint) from error
    cells = content.get("cells") if isinstance(content, Mapping) else content
    if not isinstance(cells, Sequence) or isinstance(cells, str) or not cells:
        raise KvprobeError(f"sweep {path} has no cells", hint)
    return [_cell(cell, f"cell {index} of sweep {path}") for index, cell in enumerate(cells)]


def _cell(cell: Any, where: str) -> ServiceCell:
    from kvprobe.digest import number, pick

    figures = {}
    for name in ("size_bytes", "depth", "bytes_per_s", "low_bytes_per_s", "high_bytes_per_s", "n"):
        value = number(cell, name)
        if value is None or value < 0:
            raise KvprobeError(f"no {name} in {where}", "measure again with `kvprobe sweep`")
        figures[name] = value
    direct = pick(cell, "direct")
    if not isinstance(direct, bool):
        raise KvprobeError(f"no direct in {where}", "measure again with `kvprobe sweep`")
    return ServiceCell(
        size_bytes=int(figures["size_bytes"]),
        depth=int(figures["depth"]),
        direct=direct,
        bytes_per_s=float(figures["bytes_per_s"]),
        low_bytes_per_s=float(figures["low_bytes_per_s"]),
        high_bytes_per_s=float(figures["high_bytes_per_s"]),
        n=int(figures["n"]),
        source="sweep",
    )


def _width(text: str) -> int:
    if not text.isdecimal() or not 80 <= int(text) <= 200:
        raise ArgumentTypeError(f"{text!r} is not a width from 80 to 200")
    return int(text)


COMMAND = Command(
    "report", "ledger, break-even, findings and proposals of a capture", configure, run
)
