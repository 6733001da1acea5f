"""``make demo``: trace a badly configured KV-cache workload, apply what is proposed, compare.

Every step is a command that you could type; it is printed before it runs. With root and eBPF the
steps run on a small file system of their own on a loop device. Without, the same analysis runs on
the captures in ``tests/data/demo``. ``--keep DIR`` leaves the captures there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvprobe.capture.reader import open_capture
from kvprobe.correlator import Ledger, correlate
from kvprobe.document import facts_of, propose
from kvprobe.errors import KvprobeError
from kvprobe.findings import detect_all
from kvprobe.model import Facts, Interval, Proposal
from kvprobe.prediction import predict_restore, predict_ttft, setting, settings_after
from kvprobe.units import duration
from kvprobe.workload.scratch import scratch_filesystem
from kvprobe.workload.sweep_file import read_sweep

RECORDED = Path(__file__).parent / "tests" / "data" / "demo"
# Small units read one at a time: the defaults of several engines, and the mistake seen most often.
REQUESTS, UNIT_TOKENS, READS_IN_FLIGHT = 211, 16, 1
SHAPE = "--model custom --layers 4 --kv-heads 4 --head-dim 64 --synthetic --seed 7"
LOAD = (
    f"{SHAPE} --requests {REQUESTS} --prompt-tokens 1536 --max-prompt-tokens 4096 --prefixes 11 "
    "--concurrency 1 --prefill-cost 2,14,0.4 --direct"
)
DRAWS = 2000


@dataclass(frozen=True)
class Files:
    """What the demo leaves behind, in order of its making."""

    before: Path
    sweep: Path
    after: Path

    @classmethod
    def within(cls, folder: Path) -> Files:
        """The three files under ``folder``."""
        return cls(folder / "before.kvcap", folder / "sweep.json", folder / "after.kvcap")


def main() -> int:
    """Run the demo; the exit code of the first step that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, prog="demo.py")
    parser.add_argument("--keep", metavar="DIR", help="leave the captures in this folder")
    parser.add_argument("--recorded", action="store_true", help="use the recorded captures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kvprobe-demo-") as temporary:
        keep = Path(options.keep) if options.keep else Path(temporary)
        try:
            keep.mkdir(parents=True, exist_ok=True)
            _run(Files.within(keep), Files.within(RECORDED), options.recorded)
        except subprocess.CalledProcessError as error:
            print(f"demo: this step failed with exit code {error.returncode}", file=sys.stderr)
            return error.returncode if error.returncode > 0 else 1
        except (KvprobeError, OSError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 3
        except KeyboardInterrupt:
            print("demo: interrupted; everything it made is removed", file=sys.stderr)
            return 130
    return 0


def _run(files: Files, recorded: Files, use_recorded: bool) -> None:
    reason = "asked for" if use_recorded else _cannot_trace()
    if reason:
        say(f"Not tracing here ({reason}): the same analysis on recorded captures.")
        kvprobe("report", recorded.before, "--requests", "5")
        _judge(recorded, _proposals(recorded), "")
        return
    with scratch_filesystem(3 << 30) as disk:
        say(f"A file system of our own: {disk.root} ({disk.name or 'a folder: ' + disk.why}).")
        say(f"1. {REQUESTS} requests, badly configured on purpose: {UNIT_TOKENS} tokens a file,")
        say(f"   {READS_IN_FLIGHT} read at a time.")
        bad = f"--unit-tokens {UNIT_TOKENS} --reads-in-flight {READS_IN_FLIGHT}"
        _trace(files.before, disk.root, bad)
        say("2. Where the time went, for the slowest requests, and what kvprobe proposes.")
        kvprobe("report", files.before, "--requests", "5")
        say("3. Nothing is predicted that was not measured: what can this storage do?")
        _sweep(files, disk.root)
        proposals = _proposals(files)
        settings = _settings(_facts(files)[1], proposals)
        if not proposals or not settings:
            say("No change is worth it here: this storage gains nothing by larger units or depth.")
            return
        say(f"4. The same requests with the proposals applied: {settings}")
        shutil.rmtree(_store(disk.root))
        _trace(files.after, disk.root, settings)
        _judge(files, proposals, settings)


def _cannot_trace() -> str:
    if os.geteuid() != 0:
        return "not root"
    done = subprocess.run(
        [sys.executable, "-m", "kvprobe", "doctor"], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else "no eBPF on this machine; see kvprobe doctor"


def _store(root: str) -> Path:
    return Path(root, "kv")


def _trace(capture: Path, root: str, settings: str) -> None:
    """Store the chunks that prompts share, then record a run that restores them."""
    store = _store(root)
    store.mkdir()
    events = capture.with_suffix(".jsonl")
    workload = f"workload run --root {store} {LOAD} {settings}"
    kvprobe(*workload.split(), "--warm", "reused", "--warm-only", quiet=True)
    scope = f"-o {capture} --force --root {store} --engine jsonl --signal {events} --"
    child = (sys.executable, "-m", "kvprobe", *workload.split(), "--events", str(events))
    kvprobe("capture", *scope.split(), *child, quiet=True)


def _sweep(files: Files, root: str) -> None:
    """Measure what the tuners ask for: the present unit up to 16 of them, depth 1 to 16."""
    unit = correlate(open_capture(files.before)).engine
    size = (unit.unit_bytes if unit else None) or 1 << 17
    sizes = ",".join(f"{size * factor >> 10}k" for factor in (1, 4, 16))
    limits = "--seconds-per-cell 0.5 --repeats 3 --depths 1,2,4,8,16 --max-bytes 512m"
    kvprobe("sweep", root, "--sizes", sizes, *limits.split(), "-o", files.sweep)


def _facts(files: Files) -> tuple[Ledger, Facts]:
    capture = open_capture(files.before)
    ledger = correlate(capture)
    return ledger, facts_of(ledger, capture.manifest, read_sweep(str(files.sweep)))


def _proposals(files: Files) -> list[Proposal]:
    ledger, facts = _facts(files)
    wanted = [p for p in propose(detect_all(ledger), facts) if p.needs is None]
    return [p for p in wanted if p.knob in ("unit_bytes", "bytes_in_flight")]


def _settings(facts: Facts, proposals: Sequence[Proposal]) -> str:
    """The proposals in the workload's own options."""
    words = []
    for proposal in proposals:
        said = setting(facts, proposal.knob, int(proposal.proposed or 0))
        if said is not None and said.name is not None:
            words.append(f"{said.name} {said.value}")
    unit_bytes, reads = settings_after(facts, proposals)
    if unit_bytes is not None and reads is not None:
        # Each proposal stands for itself: bytes in flight were counted in present units.
        words[-1] = f"--reads-in-flight {reads}"
    return " ".join(words)


def _judge(files: Files, proposals: Sequence[Proposal], settings: str) -> None:
    """Predicted beside measured, each with its interval."""
    before, facts = _facts(files)
    after = correlate(open_capture(files.after))
    unit_bytes, reads = settings_after(facts, proposals)
    say("Proposed and applied:")
    for p in proposals:
        say(f"   {p.knob} {p.current} -> {p.proposed} {p.unit}: {p.reason}")
    rows = [
        ("restore", predict_restore(facts, unit_bytes, reads), _restores(before), _restores(after)),
        ("first token", predict_ttft(facts, unit_bytes, reads), _ttfts(before), _ttfts(after)),
    ]
    say("")
    say(f"{'mean of a request':22}{'before':>10}{'predicted':>30}{'measured':>30}")
    for name, predicted, old, new in rows:
        now = float(old.mean())
        say(f"{name:22}{duration(now):>10}{_shown(predicted):>30}{_shown(_mean(new)):>30}")
        promised, kept = _gain(predicted, now), _measured_gain(old, new)
        say(f"{'  gain':22}{'':>10}{promised:>30}{kept:>30}")
    say("")
    say(f"n = {len(rows[0][2])} restores before and {len(rows[0][3])} after; intervals are 90 %.")
    say("One run each, so the measured interval holds the scatter of requests, not of the day.")


def _restores(ledger: Ledger) -> NDArray[np.float64]:
    done = [a.restore.exposed_ns for a in ledger.accounts if a.restore and a.restore.bytes]
    return np.array(done, float)


def _ttfts(ledger: Ledger) -> NDArray[np.float64]:
    restored = [a for a in ledger.accounts if a.restore and a.restore.bytes]
    return np.array([a.ttft_ns for a in restored if a.ttft_ns is not None], float)


def _means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Bootstrap means."""
    rng = np.random.default_rng(seed)
    means: NDArray[np.float64] = rng.choice(values, (DRAWS, len(values))).mean(axis=1)
    return means


def _mean(values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(_means(values, 1), [0.05, 0.95]).tolist()
    return Interval(float(values.mean()), low, high, len(values))


def _shown(value: Interval | None) -> str:
    if value is None:
        return "not predicted"
    return f"{duration(value.mid)} ({duration(value.low)} to {duration(value.high)})"


def _gain(predicted: Interval | None, now: float) -> str:
    if predicted is None:
        return "nothing"
    mid, low, high = (1 - x / now for x in (predicted.mid, predicted.high, predicted.low))
    return f"{mid:.0%} ({low:.0%} to {high:.0%})"


def _measured_gain(old: NDArray[np.float64], new: NDArray[np.float64]) -> str:
    ratio = 1 - _means(new, 2) / _means(old, 3)
    low, high = np.quantile(ratio, [0.05, 0.95])
    return f"{1 - new.mean() / old.mean():.0%} ({low:.0%} to {high:.0%})"


def say(line: str) -> None:
    """A line of the demo's own, in order with what the commands print."""
    print(line, flush=True)


def kvprobe(*words: str | Path, quiet: bool = False) -> None:
    """Show and run one command; ``quiet`` keeps its output unless it fails."""
    shown = ["kvprobe" if w == sys.executable else str(w) for w in words]
    text = shlex.join(shown).replace("kvprobe -m kvprobe", "kvprobe")
    print(f"\n$ kvprobe {text}", flush=True)
    command = [sys.executable, "-m", "kvprobe", *map(str, words)]
    done = subprocess.run(command, capture_output=quiet, text=True)
    if quiet and done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    # 1 says that findings were severe enough: this demo is made of them.
    if done.returncode not in (0, 1):
        raise subprocess.CalledProcessError(done.returncode, command)


if __name__ == "__main__":
    sys.exit(main())
