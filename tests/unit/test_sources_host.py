"""The host sampler and the clock: against psutil, real I/O, and files that make no sense."""

import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe import clock, schema
from kvprobe.clock import ClockSample
from kvprobe.sources.host import HostSampler

Sample = dict[tuple[str, str], float]


def sample(sampler: HostSampler) -> Sample:
    rows = sampler.sample()
    found = {(row["metric"], row["subject"]): row["value"] for row in rows}
    assert len(found) == len(rows), "a metric occurs once per subject"
    return found


def procfs(folder: Path, **files: str) -> HostSampler:
    (folder / "pressure").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("pressure_io", "pressure/io")).write_text(text)
    return HostSampler(folder)


def test_rows_have_the_columns_of_the_table() -> None:
    rows = HostSampler().sample()
    assert {tuple(row) for row in rows} == {tuple(c.name for c in schema.HOST.columns)}
    assert len({row["time_ns"] for row in rows}) == 1


def test_against_psutil() -> None:
    sampler = HostSampler()
    before, middle, after = psutil.cpu_times(), sample(sampler), psutil.cpu_times()
    slack = 0.011  # a tick
    for name, metric in (("softirq", "cpu_softirq_ns"), ("iowait", "cpu_iowait_ns")):
        value = middle[metric, ""] / 1e9
        assert getattr(before, name) - slack <= value <= getattr(after, name) + slack
    memory = psutil.virtual_memory()
    assert middle["memory_available_bytes", ""] == pytest.approx(memory.available, rel=0.1)
    for cpu in range(psutil.cpu_count() or 1):
        assert ("cpu_busy_ns", f"cpu{cpu}") in middle


def test_units(tmp_path: Path) -> None:
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    found = sample(
        procfs(
            tmp_path,
            stat="cpu  2 3 5 7 11 13 17 19 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\nintr 99\n",
            pressure_io="some avg10=0.00 avg60=0.00 avg300=0.00 total=23\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=29\n",
            meminfo="MemTotal: 1 kB\nMemFree:  31 kB\nCached: 37 kB\nDirty: 41 kB\n",
            vmstat="pgpgin 43\npgmajfault 47\nworkingset_refault_file 53\nnr_free_pages 1\n",
            diskstats="   7  0 loop0 0 0 0 0 0 0 0 0 0 0 0\n"
            " 259  1 nvme0n1 59 61 67 71 73 79 83 89 97 101 103 0 0 0 0 0 0\n",
        )
    )
    assert found == {
        ("cpu_busy_ns", ""): (2 + 3 + 5 + 13 + 17 + 19) * tick,
        ("cpu_softirq_ns", ""): 17 * tick,
        ("cpu_iowait_ns", ""): 11 * tick,
        ("cpu_busy_ns", "cpu1"): tick,
        ("cpu_softirq_ns", "cpu1"): 0,
        ("cpu_iowait_ns", "cpu1"): 0,
        ("psi_io_some_ns", ""): 23_000,
        ("psi_io_full_ns", ""): 29_000,
        ("memory_free_bytes", ""): 31 << 10,
        ("page_cache_bytes", ""): 37 << 10,
        ("dirty_bytes", ""): 41 << 10,
        ("page_in_bytes", ""): 43 << 10,
        ("page_faults_major", ""): 47,
        ("file_refaults", ""): 53,
        ("reads_completed", "nvme0n1"): 59,
        ("read_bytes", "nvme0n1"): 67 * 512,
        ("writes_completed", "nvme0n1"): 73,
        ("write_bytes", "nvme0n1"): 83 * 512,
        ("in_flight", "nvme0n1"): 97,
        ("io_time_ns", "nvme0n1"): 101_000_000,
    }


def test_what_does_not_parse_is_absent_and_the_rest_is_there(tmp_path: Path) -> None:
    found = sample(
        procfs(tmp_path, meminfo="MemFree: many kB\nDirty:\nCached: 3 kB\n", diskstats="7 0\nx\n")
    )
    assert found == {("page_cache_bytes", ""): 3072}


NUMBERS = st.lists(st.integers(-9, 2**70).map(str), max_size=14).map(" ".join)
LINES = st.lists(st.text() | NUMBERS | NUMBERS.map("cpu ".__add__), max_size=3).map("\n".join)


@given(text=LINES, file=st.sampled_from(["stat", "meminfo", "vmstat", "diskstats"]))
def test_no_text_ends_a_sample(
    tmp_path_factory: pytest.TempPathFactory, text: str, file: str
) -> None:
    content = text.encode("utf-8", "replace").decode()
    for row in procfs(tmp_path_factory.mktemp("procfs"), **{file: content}).sample():
        assert row["metric"] and row["value"] == row["value"]


def test_a_device_that_vanishes_has_no_further_rows(tmp_path: Path) -> None:
    line = "259 1 nvme0n1 1 1 1 1 1 1 1 1 1 1 1\n"
    sampler = procfs(tmp_path, diskstats=line)
    assert ("in_flight", "nvme0n1") in sample(sampler)
    (tmp_path / "diskstats").write_text("")
    assert sample(sampler) == {}


def test_due_once_per_interval() -> None:
    sampler = HostSampler(interval_ns=10**9)
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert sampler.due(now)
    sampler.sample()
    assert not sampler.due(now + 10**8)
    assert sampler.due(now + 2 * 10**9)


@pytest.mark.root
def test_bytes_of_real_reads(tmp_path: Path) -> None:
    """Direct reads of a loop device of our own: the counters move by exactly what was read."""
    image, reads, size = tmp_path / "image", 13, 28_672
    image.write_bytes(bytes(4 << 20))
    if not shutil.which("losetup"):
        pytest.skip("losetup is not installed")
    name = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        subject = Path(name).name
        before = sample(HostSampler())
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, size) as buffer:
            for index in range(reads):
                assert os.preadv(descriptor, [buffer], index * size) == size
        os.close(descriptor)
        after = sample(HostSampler())
    finally:
        subprocess.run(["losetup", "--detach", name], check=True)
    for metric, expected in (("reads_completed", reads), ("read_bytes", reads * size)):
        assert after[metric, subject] - before.get((metric, subject), 0) == expected


def test_clock_samples_bracket_the_wall_clock() -> None:
    first = clock.sample_clocks()
    wall = time.time_ns()
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    second = clock.sample_clocks()
    assert first.at_ns <= monotonic <= second.at_ns
    assert 0 < first.uncertainty_ns < 1_000_000
    assert abs(wall - monotonic - first.offset_ns) < 5_000_000
    assert clock.clock_step_ns(first, second) == 0


def test_a_step_is_told_from_uncertainty() -> None:
    before = ClockSample(at_ns=0, offset_ns=1_000_000, uncertainty_ns=100)
    assert clock.clock_step_ns(before, ClockSample(1, 1_000_180, 100)) == 0
    assert clock.clock_step_ns(before, ClockSample(1, 1_000_211, 100)) == 211
    assert clock.clock_step_ns(before, ClockSample(1, 500_000, 100)) == -500_000
