"""How fast an engine's log is searched: kvprobe's blocks, against every pattern on every line.

Both read one file of mixed lines, shaped as vLLM, LMCache, SGLang and Mooncake write them, with
what all adapters look for, and each must find every message that is in it.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.document import Aim, Column, Outcome, Table, Value
from benchmarks.harness.estimate import median_interval
from benchmarks.harness.quiet import wait_until_quiet
from kvprobe.adapter import LogLine
from kvprobe.clock import WallClock
from kvprobe.engines import engines
from kvprobe.model import Interval
from kvprobe.signals.log import LogFeed

AIM_LINES_PER_SECOND = 200e3
LINES = 200_003
SHARES = {"1 % messages": 0.01, "10 % messages": 0.1, "10 %, with colours": 0.1}
_PATIENCE_SECONDS = 300.0
_V, _L = "(EngineCore pid=27411) DEBUG 12-01 17:20:{s} ", "[2026-12-01 17:26:{s},990] LMCache "
_MESSAGES = (
    _V + "[distributed/.../offloading/scheduler.py:945] Request cmpl-{n}-0-bb3b4d3f hit 896 "
    "offloaded tokens after 0 GPU hit tokens",
    "(APIServer pid=25672) INFO 12-01 17:18:{s} [entrypoints/.../utils/request_logger.py:65] "
    "Received request cmpl-{n}-0: params: SamplingParams(n=1, temperature=0.0, top_p=1.0, "
    "max_tokens=8), lora_request: None.",
    _L + "INFO: [req_id=req-{n}] Retrieved 2048 out of 2048 required tokens (from 2048 total "
    "tokens). size: 0.0039 gb, cost 20.2479 ms, throughput: 0.1929 GB/s; "
    "(cache_engine.py:985:lmcache.v1.cache_engine)",
    "[2026-12-01 17:20:{s} TP0] HiCache prefetch success req={n} completed=512 matched=512 "
    "loaded=512 occupied=512",
)
_OTHERS = (
    '(APIServer pid=8501) INFO:     127.0.0.1:{n} - "POST /v1/completions HTTP/1.1" 200 OK',
    _V + "[v1/core/kv_cache_manager.py:211] Allocated {n} blocks to a request of the running "
    "queue, {n} blocks are left in the pool",
    "(APIServer pid=8501) INFO 12-01 17:20:{s} [loggers.py:259] Engine 000: Avg prompt "
    "throughput: {n}.3 tokens/s, Avg generation throughput: 1.4 tokens/s, Running: 3 reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 1.7%, Prefix cache hit rate: 31.0%",
    _L + "DEBUG: Prefetch request submitted: 4 keys in 1 groups (external_request_id=req-{n}, "
    "prefetch_request_id={n}, skip_l2=False) "
    "(storage_manager.py:609:lmcache.v1.distributed.storage_manager)",
    "I1201 17:38:{s}.862865  2771 client_metric.cpp:102] Client metrics: {n} bytes, reporting "
    "disabled (interval=0), {n} handles in use by the transfer engine",
    '  File "/usr/lib/python3/dist-packages/vllm/v1/core/sched/scheduler.py", line {n}, in step',
)


def measure(quick: bool, say: Callable[[str], None]) -> Outcome:
    """Time both on logs with few and with many messages."""
    repeats, lines = (3, LINES // 10) if quick else (15, LINES)
    looked_for = [line for engine in engines().values() for line in engine.log_lines]
    outcome = Outcome({"lines": lines, "kinds_of_line": len(looked_for)})
    rows: list[dict[str, Value]] = []
    slowest = float("inf")
    with tempfile.TemporaryDirectory(prefix="kvprobe-bench-logs-") as folder:
        for what, share in SHARES.items():
            say(what)
            log = Path(folder, "engine.log")
            messages = _write(log, lines, share, colours="colours" in what)
            wait_until_quiet(0.0 if quick else _PATIENCE_SECONDS)
            timed = _in_turn(log, looked_for, messages, repeats)
            for method, seconds in timed.items():
                rate = lines / seconds.mid
                row: dict[str, Value] = {"log": what, "method": method, "lines_per_second": rate}
                row |= {"us_per_line": _scaled(seconds, 1e6 / lines), "samples": seconds.n}
                row["times_kvprobe"] = seconds.mid / timed["kvprobe"].mid
                rows.append(row)
            slowest = min(slowest, lines / timed["kvprobe"].mid)
    columns = (
        Column("log", "log"),
        Column("method", "method"),
        Column("us_per_line", "us/line", ".2f"),
        Column("lines_per_second", "k lines/s", ".0f", 1e-3),
        Column("times_kvprobe", "x kvprobe", ".1f"),
        Column("samples", "samples", "d"),
    )
    outcome.tables.append(Table("one core, median [90 % interval]", columns, tuple(rows)))
    outcome.aims.append(
        Aim(
            f"search at least {AIM_LINES_PER_SECOND / 1e3:.0f}k lines/s of any of these logs",
            f"{slowest / 1e3:.0f}k lines/s",
            slowest >= AIM_LINES_PER_SECOND,
        )
    )
    outcome.notes.append("kvprobe also reads the messages, and when each was written")
    outcome.notes.append("a rival looks for the patterns only, and not at colours")
    return outcome


def _write(path: Path, lines: int, share: float, colours: bool) -> int:
    """Write a log; returns how many messages are in it."""
    generator = random.Random(17)
    messages = 0
    with path.open("w") as file:
        for number in range(lines):
            is_message = generator.random() < share
            messages += is_message
            line = generator.choice(_MESSAGES if is_message else _OTHERS)
            text = line.format(n=number, s=f"{number // 5000 % 60:02d}")
            if colours:
                text = text.replace("(", "\x1b[0;36m(", 1).replace(")", ")\x1b[0;0m", 1)
                text = text.replace("INFO", "\x1b[32mINFO\x1b[0m", 1)
            file.write(text + "\n")
    return messages


def _in_turn(
    log: Path, looked_for: Sequence[LogLine], messages: int, repeats: int
) -> dict[str, Interval]:
    """Seconds of processor time of each method, which take turns.

    Raises:
        AssertionError: one has not found all messages.
    """
    methods = {
        "kvprobe": _kvprobe,
        "every pattern on every line": _line_by_line,
        "one pattern of all marks on every line": _marks_first,
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            began = time.thread_time()
            found = method(log, looked_for)
            seconds[name].append(time.thread_time() - began)
            assert found == messages, (name, found, messages)
    return {name: median_interval(samples) for name, samples in seconds.items()}


def _kvprobe(log: Path, looked_for: Sequence[LogLine]) -> int:
    feed, clock = LogFeed(str(log), looked_for), WallClock()
    found = 0
    while (batch := feed.poll(clock)).understood:
        found += batch.understood
    return found + feed.close(clock).understood


def _line_by_line(log: Path, looked_for: Sequence[LogLine]) -> int:
    searches = [line.pattern.search for line in looked_for]
    with log.open(errors="replace") as file:
        return sum(any(search(line) for search in searches) for line in file)


def _marks_first(log: Path, looked_for: Sequence[LogLine]) -> int:
    marked = re.compile("|".join(re.escape(line.mark) for line in looked_for)).search
    searches = [line.pattern.search for line in looked_for]
    with log.open(errors="replace") as file:
        return sum(
            marked(line) is not None and any(search(line) for search in searches) for line in file
        )


def _scaled(interval: Interval, by: float) -> Interval:
    low, mid, high = (value * by for value in (interval.low, interval.mid, interval.high))
    return Interval(mid, low, high, interval.n, interval.level)
