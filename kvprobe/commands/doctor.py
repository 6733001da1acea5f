"""``kvprobe doctor``: what this machine can show, what it cannot, and how to fix it."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from kvprobe.commands import Command
from kvprobe.errors import ExitCode

SCHEMA_VERSION = 1


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        metavar="DIR",
        help="where the KV cache is, or its disk such as /dev/nvme0n1; without it all devices are "
        "listed",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _run(options: Namespace) -> int:
    from kvprobe.commands._diagnosis import diagnose
    from kvprobe.commands._doctor_text import lines
    from kvprobe.commands._terminal import Style

    diagnosis = diagnose(options.path)
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(diagnosis)}))
    else:
        style = Style.of(sys.stdout)
        for line in lines(diagnosis.features, diagnosis.summary, style, diagnosis.chain):
            print(line)
    return ExitCode.OK if diagnosis.capture_possible else ExitCode.UNSUPPORTED


COMMAND = Command(
    "doctor",
    "what this machine can show, what it cannot, and how to fix it",
    _configure,
    _run,
)
