"""``python -m benchmarks.gpu overhead|device``: measure, print, keep under ``gpu/results/``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gpu import device, overhead
from benchmarks.harness import document, machine
from kvprobe.errors import KvprobeError

RESULTS = Path(__file__).parent / "results"
KNOWN = {"overhead": overhead.measure, "device": device.measure}


def main() -> int:
    """Run the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("name", choices=KNOWN)
    parser.add_argument("--quick", action="store_true", help="a smoke run: no figure to quote")
    options = parser.parse_args()
    facts = machine.facts()
    began = time.monotonic()
    try:
        outcome = KNOWN[options.name](
            options.quick, lambda line: print(f"{options.name}: {line}", file=sys.stderr)
        )
    except KvprobeError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    facts["took"] = f"{time.monotonic() - began:.0f} s"
    text = document.as_text(options.name, facts, outcome)
    print(text, flush=True)
    if not options.quick:
        found = document.as_json(options.name, facts, outcome)
        document.save(RESULTS, options.name, found, text)
    return int(any(aim.met is False for aim in outcome.aims))


if __name__ == "__main__":
    sys.exit(main())
