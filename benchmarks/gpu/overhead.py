"""What the sampler itself costs: eight devices of the stand-in driver that the tests build.

The stand-in answers at once, so this is kvprobe's own part: threads, Python, ctypes, rows. What a
real driver adds to each call, ``device`` measures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from tests.gpu.standin import GPM, Script, build, sample

GPUS = 8
AIM_SHARE = 0.01


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Sample at 10 Hz and at the pace of a capture, then with PCIe calls that take 20 ms."""
    seconds = 3.0 if quick else 30.0
    outcome = Outcome({"gpus": GPUS, "seconds": seconds})
    rows: list[dict[str, Value]] = []
    with tempfile.TemporaryDirectory(prefix="kvprobe-bench-") as folder:
        today = build(Path(folder) / "today")
        old = build(Path(folder) / "old", "-DOLD_DRIVER")
        for what, library, interval_ms in (
            ("GPM at 10 Hz", today, 100),
            ("GPM as a capture samples", today, 125),
            ("no GPM, PCIe calls of 20 ms", old, 125),
        ):
            say(what)
            script = Script(gpus=GPUS).slow("*", "nvmlDeviceGetPcieThroughput", 20)
            for column in GPM:
                script.gpm_value("*", column, 0, 37)
            for key in ("util_gpu", "util_memory", "pcie_rx_kib", "pcie_tx_kib"):
                script.value("*", key, 0, 37)
            run = sample(library, script, Path(folder) / str(len(rows)), seconds, interval_ms)
            calls = sum(call["calls"] for call in run.sampling["calls"])
            rows.append(
                {
                    "what": what,
                    "cpu_share": run.cpu_share,
                    "calls_per_s": calls / seconds,
                    "us_per_call": run.cpu_share * seconds * 1e6 / calls,
                    "missed": sum(call["missed"] for call in run.sampling["calls"]),
                }
            )
    outcome.tables.append(
        Table(
            f"{GPUS} devices, nothing else in the process",
            (
                Column("what", "sampling"),
                Column("cpu_share", "of a core, %", ".2f", 100),
                Column("calls_per_s", "calls/s", ".0f"),
                Column("us_per_call", "CPU us/call, all in", ".0f"),
                Column("missed", "periods missed", ".0f"),
            ),
            tuple(rows),
        )
    )
    share = float(str(rows[0]["cpu_share"]))
    outcome.aims.append(
        Aim(
            f"less than {AIM_SHARE:.0%} of a core at 10 Hz for {GPUS} devices",
            f"{share:.2%}, {share / AIM_SHARE:.2f} times the aim",
            share < AIM_SHARE,
        )
    )
    return outcome
