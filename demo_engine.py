"""``make demo ENGINE=vllm``: kvprobe beside a real server that keeps its KV cache in files.

vLLM's CPU build, in an environment of its own, serves a tiny model of random weights. Requests
that share prefixes are stored, the server is restarted so that memory holds nothing, and they are
sent again: from a fast disk and from a slow one. ``--keep DIR`` leaves the captures there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo import kvprobe, say
from kvprobe.correlator import Ledger
from kvprobe.errors import KvprobeError
from kvprobe.units import duration
from kvprobe.workload.scratch import Scratch
from kvprobe.workload.throttle import Limits, throttle
from tests.live.engine_capture import capture_words, capturing, seen
from tests.live.engine_client import Ask, Client, tokens
from tests.live.engine_disk import disk_folder
from tests.live.engine_process import (
    EngineFailedError,
    EngineMissingError,
    free_ports,
    python_of,
)
from tests.live.engine_vllm import Options, VllmServer, fs_tier

PREFIXES, SHORTEST, LONGEST = 13, 1100, 2800
"""More than the memory of the server holds, so that each turn of a prefix finds it on disk only."""
OWN_TOKENS, COMPUTED = 97, 26
DEVICE_BLOCKS, HOST_BLOCKS = 96, 96
SLOW_BYTES_PER_S = 20 << 20


def main() -> int:
    """Run the demo; 0, or 3 where this machine cannot."""
    parser = argparse.ArgumentParser(description=__doc__, prog="demo_engine.py")
    parser.add_argument("engine", choices=("vllm",), help="the engine to run")
    parser.add_argument("--keep", metavar="DIR", help="leave the captures in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _check(options.engine)
        with tempfile.TemporaryDirectory(prefix="kvprobe-demo-") as temporary:
            keep = Path(options.keep or temporary)
            keep.mkdir(parents=True, exist_ok=True)
            _run(Path(temporary), keep)
    except (EngineMissingError, EngineFailedError, KvprobeError, OSError, AssertionError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started is ended and removed", file=sys.stderr)
        return 130
    return 0


def _check(engine: str) -> None:
    python_of(engine)
    if os.geteuid() != 0:
        raise EngineMissingError("tracing needs root: sudo make demo ENGINE=vllm")


def _run(folder: Path, keep: Path) -> None:
    fast, slow = keep / "fast.kvcap", keep / "slow.kvcap"
    with disk_folder() as disk:
        root = Path(disk.root, "kv")
        root.mkdir()
        say(f"vLLM keeps its KV cache below {root}, on {disk.name or 'a folder: ' + disk.why}.")
        say(
            f"1. {PREFIXES} prompts of {SHORTEST} to {LONGEST} tokens: all are computed and stored."
        )
        with _server(root, folder, free_ports(1)[0]) as server:
            server.client.ask_all(_asks("store", 0))
        stored = list(root.rglob("*.bin"))
        say(f"   {len(stored)} files, {sum(p.stat().st_size for p in stored) >> 20} MiB.")
        say("2. A restart: what was in memory is gone. The same prompts, each with another ending:")
        with _server(root, folder, free_ports(1)[0]) as server:
            say("   from the disk as it is,")
            _record(server, fast, root, turn=1)
            say(f"   and from a disk of {SLOW_BYTES_PER_S >> 20} MiB/s.")
            with _slowed(disk, server):
                _record(server, slow, root, turn=3)
        for number, capture, words in ((3, fast, "The disk as it is"), (4, slow, "The slow disk")):
            say(f"\n{number}. {words}.")
            kvprobe("report", capture, "--requests", "3")
            _in_plain_words(seen(capture).ledger)


@contextmanager
def _server(root: Path, folder: Path, spans_to: int) -> Iterator[VllmServer]:
    say("   Starting vLLM (half a minute) ..")
    options = Options(fs_tier(root, HOST_BLOCKS), DEVICE_BLOCKS, spans_to)
    with VllmServer(options, folder) as server:
        yield server


def _written(root: Path) -> list[Path]:
    """The files of the KV cache, once no more are added."""
    files, before = list(root.rglob("*.bin")), -1
    while len(files) != before:
        before = len(files)
        time.sleep(1)
        files = list(root.rglob("*.bin"))
    return files


def _asks(name: str, turn: int) -> list[Ask]:
    """Each prefix once, with an ending of this turn's own."""
    step = (LONGEST - SHORTEST) // (PREFIXES - 1)
    return [
        Ask(
            f"{name}-{turn}-{number}",
            [*tokens(SHORTEST + number * step, number), *tokens(OWN_TOKENS, 1000 * turn + number)],
        )
        for number in range(PREFIXES)
    ]


def _record(server: VllmServer, out: Path, root: Path, turn: int) -> None:
    """Capture two turns of all prefixes, and prompts that nobody has stored."""
    options = ("--engine", "auto", "--root", root)
    print(f"\n$ {shlex.join(capture_words(out, *options))}", flush=True)
    with capturing(out, *options):
        _send(server.client, out.stem, turn)
    print(flush=True)


def _send(client: Client, name: str, turn: int) -> None:
    seed = 100_000 * turn
    step = (LONGEST - SHORTEST) // COMPUTED
    new = [
        Ask(f"{name}-new-{n}", tokens(SHORTEST + n * step, seed + n), recompute=True)
        for n in range(COMPUTED)
    ]
    client.ask_all(new)
    for each in (turn, turn + 1):
        client.ask_all(_asks(name, each))


@contextmanager
def _slowed(disk: Scratch, server: VllmServer) -> Iterator[None]:
    if disk.device is None:
        raise KvprobeError("no device of its own to slow down", disk.why)
    limits = Limits(read_bytes_per_s=SLOW_BYTES_PER_S)
    with throttle(disk.device, limits, server.process.members()):
        yield


def _in_plain_words(ledger: Ledger) -> None:
    """What the report above says, in a few sentences."""
    restored = [a for a in ledger.accounts if a.restore is not None and a.restore.bytes]
    verdicts = Counter(account.verdict.value for account in restored)
    spent_ns = [a.spans.lookup_ns + a.spans.restore_ns for a in restored if a.spans is not None]
    say("In plain words:")
    tokens_restored = sum(account.storage_hit_tokens or 0 for account in restored)
    say(f"   {len(restored)} requests took {tokens_restored:,} tokens from files.")
    if spent_ns:
        each = duration(sum(spent_ns) / len(spent_ns))
        say(f"   Look-up and restore took {each} each on average; vLLM calls that queueing.")
    say("   Against computing the same tokens: " + _listed(verdicts) + ".")
    even = ledger.break_even
    if even.tokens is not None:
        say(f"   Restoring pays from about {even.tokens.mid:.0f} tokens on.")
    else:
        say(f"   No break-even: {even.note}.")


def _listed(verdicts: Counter[str]) -> str:
    words = {
        "restore_won": "restoring won",
        "restore_lost": "restoring lost",
        "unknown": "too close to call",
    }
    return ", ".join(f"{words.get(v, v)} {n} times" for v, n in verdicts.most_common())


if __name__ == "__main__":
    sys.exit(main())
