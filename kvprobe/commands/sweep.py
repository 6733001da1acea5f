"""``kvprobe sweep DIR``: measure what storage can serve, by read size and depth."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import units
from kvprobe.commands import Command
from kvprobe.commands._output import write_whole
from kvprobe.commands._phase import PhaseLine
from kvprobe.errors import ExitCode, KvprobeError

if TYPE_CHECKING:
    from kvprobe.workload.sweep import Plan, Sweep

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def configure(parser: ArgumentParser) -> None:
    """Add the options of ``kvprobe sweep``."""
    parser.add_argument("folder", metavar="DIR", help="a folder on the storage to measure")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="64k,256k,1m,4m",
        metavar="SIZE,SIZE",
        help="bytes a read; k, m, g (%(default)s)",
    )
    parser.add_argument(
        "--depths",
        type=_counts,
        default="1,2,4,8,16",
        metavar="N,N",
        help="reads in flight (%(default)s)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--direct", dest="direct", action="store_true", default=True, help="direct I/O (default)"
    )
    mode.add_argument(
        "--buffered", dest="direct", action="store_false", help="through a cold page cache"
    )
    parser.add_argument(
        "--seconds-per-cell", type=float, default=1.0, metavar="X", help="(%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=_count, default=3, metavar="N", help="for the intervals (%(default)s)"
    )
    parser.add_argument(
        "--max-bytes",
        type=_size,
        default="512m",
        metavar="SIZE",
        help="room the file may take; it is removed at the end (%(default)s)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the JSON document there")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(options: Namespace) -> int:
    """Measure, then print a table of rates or the document."""
    from kvprobe.workload.sweep import Plan, run_sweep
    from kvprobe.workload.sweep_file import document

    plan = Plan(
        sizes=options.sizes,
        depths=options.depths,
        direct=options.direct,
        seconds_per_cell=options.seconds_per_cell,
        repeats=options.repeats,
        max_bytes=options.max_bytes,
    )
    plan.check()
    _check_output(options.output)
    _announce(plan, options.folder)
    with PhaseLine() as progress:
        sweep = run_sweep(options.folder, plan, progress)
    found = document(sweep)
    if options.output:
        write_whole(options.output, json.dumps(found, indent=1) + "\n", "sweep")
    print(json.dumps(found) if options.json else table(sweep))
    return ExitCode.OK


def _announce(plan: Plan, folder: str) -> None:
    cells, runs = len(plan.cells), len(plan.cells) * plan.repeats
    print(
        f"sweep: {cells} cells x {plan.repeats} repeats = {runs} runs of "
        f"{plan.seconds_per_cell:g} s in {folder}, {units.size(plan.file_bytes)} of room, "
        f"about {units.duration(plan.seconds * 1e9)}",
        file=sys.stderr,
    )


def table(sweep: Sweep) -> str:
    """Rates by size and depth, each with half the width of its 90 % interval."""
    plan, device = sweep.plan, sweep.storage.device
    filesystem = sweep.storage.filesystem
    if device:
        where = f"{device.name} ({device.transport}), {filesystem}"
    else:
        where = f"{filesystem} ({sweep.storage.why})"
    lines = [
        f"{'direct' if plan.direct else 'buffered, cold'} reads from {where}, "
        f"{sweep.repeats} repeats, {sweep.fio_version}, "
        f"{sweep.deep_engine} beyond depth 1",
        "size       " + "".join(f"{f'depth {depth}':>20}" for depth in plan.depths),
    ]
    cells = {(cell.size_bytes, cell.depth): cell for cell in sweep.cells}
    for size in plan.sizes:
        texts = []
        for depth in plan.depths:
            cell = cells[size, depth]
            half = (cell.high_bytes_per_s - cell.low_bytes_per_s) / 2 / cell.bytes_per_s
            texts.append(f"{units.rate(cell.bytes_per_s)} ±{half:.0%}")
        lines.append(f"{units.size(size):11}" + "".join(f"{text:>20}" for text in texts))
    return "\n".join(lines)


def _check_output(output: str | None) -> None:
    """Fail before minutes of measuring, not after them."""
    folder = Path(output).absolute().parent if output else None
    if folder and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise KvprobeError(f"cannot write {output}", "name a writable place with --output")


def _sizes(text: str) -> tuple[int, ...]:
    return _ascending(_size(part) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return _ascending(_count(part) for part in text.split(","))


def _ascending(values: Any) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _size(text: str) -> int:
    factor = _UNITS.get(text[-1:].lower(), 0)
    return _count(text[:-1]) * factor if factor else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 40:
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


COMMAND = Command(
    "sweep", "measure the rate of storage by read size and depth, with fio", configure, run
)
