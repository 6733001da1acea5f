"""Every metric against the script: its unit, its scale, the device that it is of."""

import math
from pathlib import Path

import numpy as np
import pytest

from kvprobe.schema import GPU, UNKNOWN, ClockEvent
from kvprobe.sources.gpu.readings import ALWAYS, WITHOUT_GPM
from tests.gpu.standin import GPM, Run, Script, sample

PERCENT = {"graphics_activity_share": 41, "sm_activity_share": 37, "sm_occupancy_share": 23,
           "tensor_activity_share": 17, "dram_bandwidth_share": 71}  # fmt: skip
MIB = {"pcie_tx_bytes_per_s": 1009, "pcie_rx_bytes_per_s": 20011, "nvlink_rx_bytes_per_s": 101,
       "nvlink_tx_bytes_per_s": 103}  # fmt: skip


@pytest.fixture(scope="module")
def hopper(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two devices with GPM; the second has twice the numbers of the first, halved again."""
    script = Script(gpus=2)
    for column, number in {**PERCENT, **MIB}.items():
        script.gpm_value(0, column, 0, number)
        script.gpm_value(1, column, 0, number / 2)
    script.value(1, "power_mw", 0.001, 99_000).value(1, "memory_used", 0.001, 4_099)
    script.value(0, "clock_events", 0.001, 0x4 | 0x40).add("xid 1 0.9 79")
    script.value(0, "ecc_corrected", 0.3, 17)
    return sample(driver, script, tmp_path_factory.mktemp("hopper"), 2.5)


@pytest.mark.parametrize("column", [*PERCENT, *MIB])
def test_gpm_metrics_have_the_units_of_the_table(hopper: Run, column: str) -> None:
    truth = PERCENT[column] / 100 if column in PERCENT else MIB[column] * 1024 * 1024
    for gpu, share in ((0, 1.0), (1, 0.5)):
        rows = hopper.of(column, gpu)
        assert len(rows) >= 10
        assert rows[column] == pytest.approx(truth * share, rel=1e-9)


def test_gpm_rows_leave_no_time_uncovered(hopper: Run) -> None:
    for gpu in (0, 1):
        rows = hopper.of("dram_bandwidth_share", gpu)
        assert (rows["start_ns"][1:] == rows["time_ns"][:-1]).all()
        spans = rows["time_ns"] - rows["start_ns"]
        assert spans.min() >= 100e6
        assert (rows["uncertainty_ns"] >= 0).all()


@pytest.mark.parametrize(
    ("column", "truth"),
    [("sm_clock_hz", 1755e6), ("memory_clock_hz", 2619e6), ("power_watts", 312.345),
     ("memory_used_bytes", 61_000_000_007), ("ecc_uncorrected", 2),
     ("clock_events", ClockEvent.SW_POWER_CAP | ClockEvent.HW_THERMAL_SLOWDOWN)],
)  # fmt: skip
def test_readings_have_the_units_of_the_table(hopper: Run, column: str, truth: float) -> None:
    rows = hopper.of(column)
    late = rows[hopper.seconds(rows) > 0.1] if column == "clock_events" else rows
    assert late[column].tolist() == pytest.approx([float(truth)] * len(late), rel=1e-9)
    assert len(late)
    assert (rows["start_ns"] == UNKNOWN).all()


def test_each_device_has_its_own_readings(hopper: Run) -> None:
    late = hopper.of("power_watts", 1)
    assert late["power_watts"][hopper.seconds(late) > 0.1] == pytest.approx(99.0)
    late = hopper.of("memory_used_bytes", 1)
    assert set(late["memory_used_bytes"][hopper.seconds(late) > 0.1]) == {4099}


def test_xid_errors_carry_number_and_device(hopper: Run) -> None:
    (event,) = hopper.rows[hopper.rows["xid"] != UNKNOWN]
    assert (event["xid"], event["gpu"], event["instance"]) == (79, 1, UNKNOWN)
    begin, end = ((event[key] - hopper.epoch_ns) / 1e9 for key in ("start_ns", "time_ns"))
    assert begin <= 0.9 <= end
    assert end - begin < 1.6


def test_facts_and_peak_bandwidth(hopper: Run) -> None:
    first = hopper.sampling["gpus"][0]
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert first["uuid"] == "GPU-0f3c91a2-0000-0000-0000-000000000000"
    assert (first["serial"], first["pci_address"]) == ("1650123456780", "00000000:10:00.0")
    # NVIDIA gives 3.35 TB/s for this device; its memory clock is 2619 MHz, its bus 5120 bits.
    assert first["peak_bytes_per_s"] == pytest.approx(3.352e12, rel=1e-3)
    assert (first["power_limit_watts"], first["memory_bytes"]) == (700.0, 85_520_809_984)
    assert (first["pcie_generation"], first["pcie_lanes"]) == (5, 16)
    assert (first["gpm"], first["mig"], first["not_sampled"]) == (True, False, [])
    assert (hopper.sampling["driver"], hopper.sampling["nvml"]) == ("570.86.15", "12.570.86.15")
    assert hopper.sampling["why_none"] is None


def test_every_column_is_filled_by_somebody() -> None:
    readings = {name for reading in ALWAYS + WITHOUT_GPM for name in reading.columns}
    about = {"time_ns", "start_ns", "uncertainty_ns", "gpu", "instance", "xid"}
    assert readings | set(GPM) | about == {column.name for column in GPU.columns}


def test_without_gpm_utilisation_is_busy_time_and_no_bandwidth(
    old_driver: Path, tmp_path: Path
) -> None:
    script = Script()
    script.value(0, "util_gpu", 0, 83).value(0, "util_memory", 0, 29)
    script.value(0, "pcie_rx_kib", 0, 7_001_003).value(0, "pcie_tx_kib", 0, 11)
    script.slow(0, "nvmlDeviceGetPcieThroughput", 20)
    run = sample(old_driver, script, tmp_path, 2)
    assert set(run.of("kernel_time_share")["kernel_time_share"]) == {0.83}
    assert set(run.of("memory_busy_time_share")["memory_busy_time_share"]) == {0.29}
    received, sent = run.of("pcie_rx_bytes_per_s"), run.of("pcie_tx_bytes_per_s")
    assert set(received["pcie_rx_bytes_per_s"]) == {7_001_003 * 1024}
    assert set(sent["pcie_tx_bytes_per_s"]) == {11 * 1024}
    # What it is about are the 20 ms that the driver took to count.
    took = received["time_ns"] - received["start_ns"]
    assert took.min() >= 20e6
    assert np.isnan(run.rows["dram_bandwidth_share"]).all()
    assert set(run.gaps()) == {"GPM"}
    assert run.of("clock_events")["clock_events"].tolist()  # by the name it had before
    assert run.sampling["gpus"][0]["gpm"] is False


def test_a_metric_that_the_device_lacks_is_unknown(driver: Path, tmp_path: Path) -> None:
    script = Script().gpm_value(0, "nvlink_rx_bytes_per_s", 0, 5).add("gpmcode 0 60 3")
    run = sample(driver, script, tmp_path, 1)
    assert len(run.of("dram_bandwidth_share")) >= 2
    assert not len(run.of("nvlink_rx_bytes_per_s"))
    assert run.gaps() == {"nvlink_rx_bytes_per_s": "this device does not support it"}


def test_mig_instances_have_rows_of_their_own(driver: Path, tmp_path: Path) -> None:
    script = Script().value(0, "mig", 0, 1).add("mig 0 3", "mig 0 3", "mig 0 11")
    script.value(0, "gpm10.3", 0, 31).value(0, "gpm10.11", 0, 61)
    script.error(0, "nvmlGpmSampleGet", 3)  # the whole cannot be asked
    run = sample(driver, script, tmp_path, 1)
    assert run.sampling["gpus"][0]["instances"] == [3, 11]
    for instance, share in ((3, 0.31), (11, 0.61)):
        rows = run.of("dram_bandwidth_share", 0, instance)
        assert len(rows) >= 2
        assert rows["dram_bandwidth_share"] == pytest.approx(share)
    assert not len(run.of("dram_bandwidth_share"))
    assert run.gaps() == {"GPM": "this device does not support it"}


def test_busy_and_idle_phases_add_up(driver: Path, tmp_path: Path) -> None:
    """The course of activity that starvation is read from: phases, and their lengths."""
    script = Script()
    phases = ((0.0, 0), (0.37, 89), (1.13, 0), (1.71, 89), (2.83, 0), (3.29, 89))
    for at, number in phases:
        script.gpm_value(0, "sm_activity_share", max(at, 1e-6), number)
        script.gpm_value(0, "dram_bandwidth_share", max(at, 1e-6), number / 2)
    run = sample(driver, script, tmp_path, 4.2)
    rows = run.of("sm_activity_share")
    begin, end = run.seconds(rows, "start_ns"), run.seconds(rows)
    inside = (begin >= 0) & (end <= 4.2)
    rows, begin, end = rows[inside], begin[inside], end[inside]
    edges = [at for at, _ in phases] + [math.inf]
    busy = sum(
        number / 100 * max(0.0, min(stop, end[-1]) - max(start, begin[0]))
        for (start, number), stop in zip(phases, edges[1:], strict=True)
    )
    measured = float(((end - begin) * rows["sm_activity_share"]).sum())
    assert measured == pytest.approx(busy, rel=0.01)
    assert float(((end - begin) * rows["dram_bandwidth_share"]).sum()) == pytest.approx(
        busy / 2, rel=0.01
    )
    # Idle time, also in the rows that an edge divides: 0.37, 0.58 and 0.46 s.
    idle = float(((end - begin) * (1 - rows["sm_activity_share"] / 0.89)).sum())
    assert idle == pytest.approx(0.37 - begin[0] + 0.58 + 0.46, rel=0.01)
