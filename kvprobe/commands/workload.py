"""``kvprobe workload``: KV-cache traffic as an engine makes it, without a GPU."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from typing import Any

from kvprobe.commands import Command
from kvprobe.commands._phase import PhaseLine
from kvprobe.commands._workload_options import config_of, configure, count
from kvprobe.errors import ExitCode


def run(options: Namespace) -> int:
    """Run the chosen action."""
    return _analyse(options) if options.action == "analyse" else _run(options)


def _run(options: Namespace) -> int:
    from kvprobe.workload.run import run_workload

    config = config_of(options)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with PhaseLine() as progress:
            summary = run_workload(config, progress)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(summary, indent=1) if options.json else _text(summary))
    return ExitCode.OK


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _text(summary: dict[str, Any]) -> str:
    tokens, chunks = summary["tokens"], summary["chunks"]
    ttft = summary["ttft_ms"]["p50"]
    reads, read_bytes = summary["operations"]["read"], summary["bytes"]["read"]
    lines = [
        f"{summary['requests']} requests in {summary['seconds']:.1f} s, "
        f"prefill {summary['prefill']}",
        f"tokens    prompt {tokens['prompt']}, device {tokens['device']}, found {tokens['found']}, "
        f"restored {tokens['restored']}, computed {tokens['computed']}",
        f"restore   {reads} reads, {read_bytes} B, unit {summary['unit_bytes']} B",
        f"store     {chunks['warmed']} chunks before, {chunks['stored']} during the run, "
        f"{chunks['kept']} kept at {summary['base']}",
    ]
    if ttft is not None:
        rest = summary["ttft_ms"]
        lines.append(f"TTFT ms   median {ttft:.1f}, p90 {rest['p90']:.1f}, p99 {rest['p99']:.1f}")
    if summary["evicted_reads"]:
        lines.append(f"evicted   {summary['evicted_reads']} chunks between lookup and read")
    if summary["failed_reads"] or summary["corrupt_reads"]:
        lines.append(
            f"PROBLEMS  {summary['failed_reads']} reads failed, "
            f"{summary['corrupt_reads']} returned another chunk's bytes"
        )
    return "\n".join(lines)


def _analyse(options: Namespace) -> int:
    from kvprobe.workload.reuse import ideal_reuse

    units = [count(part) for part in options.unit_tokens.split(",")]
    rows = ideal_reuse(options.trace, units, options.requests)
    if options.json:
        print(json.dumps({"schema_version": 1, "trace": options.trace, "units": rows}, indent=1))
        return ExitCode.OK
    print("unit tokens   prompt tokens      reusable   share   distinct chunks")
    for row in rows:
        print(
            f"{row['unit_tokens']:>11} {row['prompt_tokens']:>15} {row['reusable_tokens']:>13} "
            f"{row['share']:>6.1%} {row['distinct_chunks']:>17}"
        )
    return ExitCode.OK


COMMAND = Command(
    name="workload",
    summary="generate KV-cache traffic as an engine makes it, or analyse a trace",
    configure=configure,
    run=run,
)
