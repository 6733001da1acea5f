"""``kvprobe report``: the ledger, break-even, findings and proposals of one capture."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprobe import registry
from kvprobe.commands import Command
from kvprobe.commands._output import write_whole
from kvprobe.commands._page import page_options
from kvprobe.errors import ExitCode, KvprobeError

_FORMATS = "kvprobe.reports"
_REQUESTS = "10"


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
        help="all requests, the N that lost most (default: 10), or one request's whole story "
        "(its first characters are enough; id:ID where they are a number)",
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
    from kvprobe.workload.sweep_file import read_sweep

    _ensure_consistent(options)
    report = registry.load_one(_FORMATS, options.format, "REPORT", Report)
    with open_capture(options.capture) as capture:
        devices = capture.manifest.devices
        sweeps = [cell for path in options.sweep for cell in read_sweep(path, devices)]
        found = document.build(capture, sweeps=sweeps)
    text = report.render(
        found,
        source=options.capture,
        requests=options.requests or _REQUESTS,
        summary=options.summary,
        **page_options(sys.stdout if options.output is None else None, options.width),
    )
    if options.output is None:
        sys.stdout.write(text)
    else:
        _write(options.output, text, options.capture)
    return _exit_code(found, options.fail_on)


def _ensure_consistent(options: Namespace) -> None:
    """An option without effect is a misunderstanding that the person should hear of."""
    asked = {
        "--requests": options.requests is not None,
        "--summary": options.summary,
        "--width": options.width is not None,
    }
    given = [name for name, is_given in asked.items() if is_given]
    if options.format != "text" and given:
        raise KvprobeError(
            f"{given[0]} is for the text report", f"{options.format} has it all: leave it out"
        )
    if options.summary and options.requests is not None:
        raise KvprobeError("--summary shows no requests", "leave out one of both")


def _exit_code(found: Mapping[str, Any], fail_on: str | None) -> ExitCode:
    from kvprobe import digest

    if fail_on and digest.worst_severity(found) >= digest.SEVERITIES.index(fail_on):
        return ExitCode.FINDINGS
    complete = digest.pick(found, "capture", "complete")
    return ExitCode.OK if complete is True else ExitCode.INCOMPLETE


def _write(output: str, text: str, capture: str) -> None:
    """Write the report, whole or not at all, and say where it is."""
    path = Path(output)
    if path.exists() and Path(capture).exists() and path.samefile(capture):
        raise KvprobeError(f"{output} is the capture itself", "name another file with --output")
    write_whole(output, text, "report")


def _width(text: str) -> int:
    if not text.isdecimal() or not 80 <= int(text) <= 200:
        raise ArgumentTypeError(f"{text!r} is not a width from 80 to 200")
    return int(text)


COMMAND = Command(
    "report", "ledger, break-even, findings and proposals of a capture", configure, run
)
