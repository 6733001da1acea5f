"""Runs the real sampler on the real pynvml in a process of its own, and keeps what came out.

``python -m tests.gpu.sample_run FOLDER SECONDS INTERVAL_NS``: ``FOLDER/lines`` becomes a script
that begins ``LEAD_S`` after the start, however long Python took to get there.
"""

import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvprobe.sources.gpu import GpuSampler

LEAD_S = 0.4


def main(out: Path, seconds: float, interval_ns: int) -> None:
    sampler = GpuSampler(interval_ns)
    epoch_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
    until_ns = epoch_ns + int(seconds * 1e9)
    lines = (out / "lines").read_text(encoding="ascii")
    (out / "script").write_text(f"epoch {epoch_ns}\n{lines}", encoding="ascii")
    polls = []
    sampler.start()
    while not sampler.sampling.gpus and time.monotonic_ns() < until_ns - 1_000_000_000:
        time.sleep(0.05)
    time.sleep(0.2)  # starting NVML and reading facts is done once
    began_ns, before = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_SELF)
    while time.monotonic_ns() < until_ns:
        time.sleep(min(0.5, max(0.0, (until_ns - time.monotonic_ns()) / 1e9)))
        polls.append(sampler.poll())
    after = resource.getrusage(resource.RUSAGE_SELF)
    ended_ns = time.monotonic_ns()
    sampling = sampler.sampling
    polls.append(sampler.close())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    np.save(out / "rows.npy", np.concatenate(polls))
    facts = {
        "sampling": asdict(sampling),
        "epoch_ns": epoch_ns,
        "cpu_share": cpu_s * 1e9 / (ended_ns - began_ns),
        "close_s": (time.monotonic_ns() - ended_ns) / 1e9,
    }
    (out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
