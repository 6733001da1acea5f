"""Starved time and copied bytes against what the workload and its accelerator did.

The accelerator is modelled and the driver a stand-in; all else is real: the reads, the probes, the
sampler through ``pynvml``, the join. The truth is made of the workload's own records only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvprobe.correlator.gpu.ledger import GpuAccount
from kvprobe.workload.accelerator import LINK_BYTES_PER_S
from kvprobe.workload.scratch import Scratch
from kvprobe.workload.throttle import Limits, throttle
from tests.gpu.standin import Script, build, environment

from .conftest import Run, traced

pytestmark = pytest.mark.root
Spans = list[tuple[int, int]]
TICK_NS = 10_000
CASES = {
    "alone": "--requests 61 --concurrency 1",
    "together": "--requests 151 --concurrency 4 --prefill-cost 2,20,0.1",
    "many-reads": "--requests 149 --concurrency 3 --reads-in-flight 4 --prefill-cost 2,20,0.1",
    "prefetch": "--requests 151 --concurrency 7 --slots 2 --prefetch --prefill-cost 2,10,0.1",
    "slow-disk": "--requests 43 --concurrency 2",
    "computed": "--requests 43 --concurrency 2 --policy recompute",
}
COSTLY_PREFILL = ("--prefill-cost", "5,60,0.2", "--prompt-tokens", "1024")
SLOW = Limits(read_bytes_per_s=61 * 2**20)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in driver."""
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    disk: Scratch,
    library: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Run, Path]:
    """One traced run per case, with the log of its accelerator."""
    folder = tmp_path_factory.mktemp("starved")
    log, script = folder / "accelerator", folder / "script"
    Script().write(script, 1)
    options = (*COSTLY_PREFILL, *CASES[request.param].split())
    settings = environment(library, script, log)
    assert disk.device is not None
    slow = throttle(disk.device, SLOW, [os.getpid()])
    with slow if request.param == "slow-disk" else nullcontext():
        run = traced(
            disk, folder, f"starved-{request.param}", *options, log=log, environment=settings
        )
    return request.param, run, log


def gpu_of(run: Run) -> GpuAccount:
    (gpu,) = run.ledger.gpus
    return gpu


# ---------------------------------------------------------------- the truth


def steps_of(log: Path, key: str) -> list[tuple[int, float]]:
    """When a value of the accelerator changed, and to what."""
    first, *lines = log.read_text().splitlines()
    epoch_ns = int(first.split()[1])
    rows = [line.split() for line in lines]
    return [
        (epoch_ns + round(float(at) * 1e9), float(value))
        for _, _, name, at, value in rows
        if name == key
    ]


def busy_spans(log: Path) -> Spans:
    """When a prefill ran."""
    steps = steps_of(log, "gpm1")
    ends = [*(at for at, _ in steps[1:]), steps[-1][0]]
    return [(at, end) for (at, value), end in zip(steps, ends, strict=True) if value and end > at]


def restore_spans(run: Run) -> Spans:
    """From the begin of a request's first read to the end of its last."""
    reads: dict[str, list[dict[str, Any]]] = {}
    for row in run.did("read"):
        reads.setdefault(row["id"], []).append(row)
    return [
        (min(row["start_ns"] for row in rows), max(row["end_ns"] for row in rows))
        for rows in reads.values()
    ]


def ticks(spans: Iterable[tuple[int, int]], low: int, high: int) -> NDArray[np.bool_]:
    """Which ticks of ``[low, high)`` the spans cover."""
    covered = np.zeros((high - low) // TICK_NS + 1, bool)
    for start, end in spans:
        covered[max(0, round((start - low) / TICK_NS)) : max(0, round((end - low) / TICK_NS))] = (
            True
        )
    return covered


def sampled(run: Run) -> tuple[int, int]:
    """From the begin of the first sample to the end of the last."""
    rows = run.capture.frame("gpu")
    known = ~np.isnan(rows["graphics_activity_share"])
    return int(rows["start_ns"][known].min()), int(rows["time_ns"][known].max())


# ---------------------------------------------------------------- what kvprobe says


def test_starved_time_is_within_five_percent(case: tuple[str, Run, Path]) -> None:
    name, run, log = case
    window = sampled(run)
    restoring = ticks(restore_spans(run), *window)
    idle = ~ticks(busy_spans(log), *window)
    truth_ns = int((restoring & idle).sum()) * TICK_NS
    found = gpu_of(run).starvation
    assert found is not None and found.n > 11
    assert found.covered_ns == pytest.approx(window[1] - window[0], rel=0.02)
    assert found.idle_ns == pytest.approx(int(idle.sum()) * TICK_NS, rel=0.02)
    if name == "computed":
        assert (found.starved_ns, found.high_ns, truth_ns) == (0, 0, 0)
        return
    assert truth_ns > 50_000_000
    assert found.restore_ns == pytest.approx(int(restoring.sum()) * TICK_NS, rel=0.05)
    assert found.starved_ns == pytest.approx(truth_ns, rel=0.05)
    assert found.low_ns * 0.99 <= truth_ns <= found.high_ns * 1.01
    assert gpu_of(run).follows_prefills


def test_the_truth_tells_other_definitions_apart(case: tuple[str, Run, Path]) -> None:
    """Each wrong figure is further off than is allowed, in the cases where it can be.

    With several requests at once, a GPU that idles hardly ever has nothing but queues before it;
    with one alone, it always idles while that is restored.
    """
    name, run, log = case
    window = sampled(run)
    restoring = ticks(restore_spans(run), *window)
    idle = ~ticks(busy_spans(log), *window)
    waits = [
        (account.arrival_ns, account.prefill_start_ns)
        for account in run.ledger.accounts
        if account.prefill_start_ns is not None
    ]
    truth = int((restoring & idle).sum())
    assert idle.sum() > 1.06 * truth
    if name in ("alone", "computed"):
        assert (ticks(waits, *window) & idle).sum() > 1.06 * truth
    else:
        assert restoring.sum() > 1.06 * truth


def test_copied_bytes_are_those_restored(case: tuple[str, Run, Path]) -> None:
    name, run, log = case
    copy = gpu_of(run).restore_copy
    if name == "computed":
        assert copy is None
        return
    assert copy is not None
    steps = steps_of(log, "gpm21")
    copied_s = sum((end - at) / 1e9 for (at, value), (end, _) in pairwise(steps) if value)
    copied = copied_s * LINK_BYTES_PER_S
    restored = sum(row["result"] for row in run.did("read"))
    assert copied == pytest.approx(restored, rel=0.01)
    # A busy machine leaves a read or two of a hundred without a request.
    assert copy.restored_bytes == pytest.approx(restored, rel=0.05)
    assert copy.received_bytes == pytest.approx(copied, rel=0.05)
