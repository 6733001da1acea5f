"""``python -m benchmarks [NAME...]``: measure, print, keep under ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import benchmarks
from benchmarks.harness import document, machine
from benchmarks.harness.document import Outcome
from kvprobe.errors import ExitCode, KvprobeError

RESULTS = Path(__file__).parent / "results"


def available() -> dict[str, Callable[[bool, Callable[[str], None]], Outcome]]:
    """Each module of this folder that has a ``measure(quick, say)``."""
    found = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if not module.ispkg and not module.name.startswith("_"):
            found[module.name] = importlib.import_module(f"benchmarks.{module.name}").measure
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named, or all."""
    known = available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="a smoke run: no figure to quote")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="keep the results there (default: benchmarks/results; nowhere with --quick)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    folder = options.output or (None if options.quick else RESULTS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # unwinds, so that devices and children go
    failed = 0
    for name in options.names or known:
        try:
            _one(name, known[name], options.quick, folder)
        except KvprobeError as error:
            print(f"benchmarks: {name}: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"hint: {error.hint}", file=sys.stderr)
            failed = error.exit_code
        except KeyboardInterrupt:
            print("benchmarks: interrupted", file=sys.stderr)
            return ExitCode.INTERRUPTED
    return failed


def _one(
    name: str,
    measure: Callable[[bool, Callable[[str], None]], Outcome],
    quick: bool,
    folder: Path | None,
) -> None:
    facts = machine.facts()
    began = time.monotonic()
    outcome = measure(quick, lambda line: print(f"{name}: {line}", file=sys.stderr))
    if quick:
        outcome.notes.insert(0, "a quick run: too short to quote a figure from")
    facts["took"] = f"{time.monotonic() - began:.0f} s"
    text = document.as_text(name, facts, outcome)
    print(text, flush=True)
    if folder is not None:
        document.save(folder, name, document.as_json(name, facts, outcome), text)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
