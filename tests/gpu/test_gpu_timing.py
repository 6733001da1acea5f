"""Calls that are slow: who waits for them, what is missed, what sampling costs."""

import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvprobe.sources.gpu.pool import GRACE_NS, Job, Pool
from tests.gpu.standin import GPM, Run, Script, sample

MS = 1_000_000


def spans_of(run: Run, gpu: int) -> NDArray[np.float64]:
    rows = run.of("dram_bandwidth_share", gpu)
    assert (rows["start_ns"][1:] == rows["time_ns"][:-1]).all()
    spans: NDArray[np.float64] = (rows["time_ns"] - rows["start_ns"]) / 1e6
    return spans


def test_a_call_of_200_ms_costs_no_other_a_period(driver: Path, tmp_path: Path) -> None:
    """Of one device each: one metric always slow, one device slow in all, GPM slow at times."""
    script = Script(gpus=4).gpm_value("*", "dram_bandwidth_share", 0, 50)
    script.slow(0, "nvmlDeviceGetPowerUsage", 200)
    script.slow(1, "*", 200, 0.001)
    script.slow(2, "nvmlGpmSampleGet", 200, 1.0, 1.05)
    run = sample(driver, script, tmp_path, 4, interval_ms=100)
    # Device 3 has nothing slow, device 0 only power: all of their periods are there.
    for gpu in (0, 3):
        spans = spans_of(run, gpu)
        assert len(spans) >= 38
        assert np.median(spans) == pytest.approx(100, abs=2)
        # Device 1 keeps five calls busy for 200 ms each in every two seconds, at first more.
        # A machine that is busy with other things may be late now and then.
        assert (spans[1:] > 150).sum() <= 3, spans
        for column in ("sm_clock_hz", "memory_used_bytes"):
            assert len(run.of(column, gpu)) >= 4
    for name in ("clock events", "memory", "SM clock"):
        assert run.call(name)["missed"] <= 8  # those of device 1
    # What is slow itself is asked less often, and leaves no time uncovered.
    assert spans_of(run, 1).max() >= 400
    assert run.call("GPM")["interval_ns"] >= 1_000 * MS
    slow = spans_of(run, 2)[1:]
    assert np.median(slow) == pytest.approx(100, abs=2)
    assert 1 <= (slow > 150).sum() <= 5
    assert run.call("power")["longest_ns"] >= 200 * MS


def test_a_call_that_never_ends_stops_neither_the_others_nor_the_end(
    driver: Path, tmp_path: Path
) -> None:
    script = Script(gpus=2).slow(0, "nvmlDeviceGetPowerUsage", 60_000)
    run = sample(driver, script, tmp_path, 2)
    assert len(run.of("sm_clock_hz", 0)) >= 2
    assert len(run.of("power_watts", 1)) >= 2
    assert not len(run.of("power_watts", 0))
    assert run.close_s < 2


def test_starting_nvml_blocks_nobody(driver: Path, tmp_path: Path) -> None:
    script = Script().slow("*", "nvmlInitWithFlags", 5_000)
    run = sample(driver, script, tmp_path, 0.5)
    assert run.sampling["why_none"] == "the NVIDIA driver has not answered yet"
    assert run.close_s < 2


def test_eight_devices_at_10_hz_cost_little(driver: Path, tmp_path: Path) -> None:
    """The figure is the benchmark's; here is a bound that also holds on a busy machine."""
    script = Script(gpus=8)
    for column in GPM:
        script.gpm_value("*", column, 0, 37)
    run = sample(driver, script, tmp_path, 5, interval_ms=100)
    assert len(run.of("dram_bandwidth_share", 7)) >= 45
    assert run.cpu_share < 0.03
    per_call = run.call("GPM")["cpu_ns"] / run.call("GPM")["calls"]
    assert 1_000 < per_call < 200_000


# ---------------------------------------------------------------- the pool alone


def test_a_slow_job_is_spaced_and_a_single_delay_is_not() -> None:
    job = Job("x", lambda: True, 100 * MS)
    job.begin(0)
    due = job.account(0, 20 * MS, 0, True)
    assert due == 200 * MS  # one slow call so far, all there is
    for _ in range(4):
        due = job.account(due, due + MS, 0, True)
    assert due == 600 * MS
    due = job.account(due, due + 250 * MS, 0, True)
    assert (due, job.missed) == (900 * MS, 2)  # 700 and 800 passed meanwhile
    assert job.longest_ns == 250 * MS


def test_a_job_that_fails_is_asked_less_and_less() -> None:
    job = Job("x", lambda: True, 100 * MS)
    job.begin(0)
    dues = [0]
    for _ in range(12):
        dues.append(job.account(dues[-1], dues[-1], 0, False))
    gaps = [b - a for a, b in pairwise(dues)]
    assert gaps[:2] == [100 * MS, 100 * MS]
    assert gaps[-1] > 10_000 * MS
    assert max(gaps) <= 60_000 * MS
    job.account(dues[-1], dues[-1], 0, True)
    assert job.spacing_ns == 100 * MS


def test_jobs_that_block_delay_the_others_by_the_grace_at_most() -> None:
    pool = Pool()
    release = threading.Event()
    times: list[int] = []

    def quick() -> bool:
        times.append(time.monotonic_ns())
        return True

    stuck = [Job(f"stuck {n}", lambda: release.wait(5), 50 * MS) for n in range(5)]
    fast = Job("quick", quick, 50 * MS)
    try:
        for job in (*stuck, fast):
            pool.add(job)
        time.sleep(0.6)
        assert pool.in_flight() >= set(stuck)
    finally:
        release.set()
        assert pool.close(2)
    assert fast.missed <= 1
    assert len(times) >= 10
    # Five that are stuck one after another cost five graces, once; a machine in use some more.
    assert max(b - a for a, b in pairwise(times)) < 50 * MS + 5 * GRACE_NS + (40 * MS)


def test_a_dropped_job_is_run_no_more() -> None:
    pool = Pool()
    calls = threading.Semaphore(0)

    def run() -> bool:
        calls.release()
        return True

    job = Job("x", run, 10 * MS)
    try:
        pool.add(job)
        assert calls.acquire(timeout=2)
        pool.drop(job)
        time.sleep(0.05)
        seen = job.calls
        time.sleep(0.1)
        assert job.calls == seen
    finally:
        assert pool.close(2)
