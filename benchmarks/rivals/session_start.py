"""How long a tracing session takes to open, in a fresh process.

Run as ``python -m benchmarks.rivals.session_start LOADER``; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.rivals import peak_bytes
from kvprobe.bpf.session import open_session
from kvprobe.model import Filters


def main() -> None:
    """Open all probes, close them."""
    began = time.perf_counter()
    session = open_session(None, Filters(), sys.argv[1])
    opened = time.perf_counter()
    peak = peak_bytes(os.getpid())
    session.close()
    closed = time.perf_counter()
    print(json.dumps({"open": opened - began, "close": closed - opened, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
