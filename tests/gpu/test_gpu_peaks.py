"""What devices could do at most, as the real driver library tells it, against their data sheets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvprobe.sources.gpu.peaks import pcie_bytes_per_s, peak_flops_per_s
from tests.gpu.standin import Script, sample


class Sheet(NamedTuple):
    """Published of a device: CUDA cores, boost clock, dense 16-bit tensor TFLOPS (None: n/a)."""

    name: str
    capability: int
    cores: int
    mhz: int
    tflops: float | None
    tolerance: float = 0.004


SHEETS = (
    Sheet("Tesla V100-SXM2-16GB", 70, 5120, 1530, 125),
    Sheet("NVIDIA A100-SXM4-80GB", 80, 6912, 1410, 312),
    Sheet("NVIDIA A30", 80, 3584, 1440, 165),
    Sheet("NVIDIA A40", 86, 10752, 1740, 149.7),
    Sheet("NVIDIA A10", 86, 9216, 1695, 125),
    Sheet("NVIDIA GeForce RTX 3090", 86, 10496, 1695, 71),
    Sheet("NVIDIA L40S", 89, 18176, 2520, 362.05, 0.013),
    Sheet("NVIDIA L4", 89, 7424, 2040, 121),
    Sheet("NVIDIA RTX 6000 Ada Generation", 89, 18176, 2505, 1457 / 4),
    Sheet("NVIDIA GeForce RTX 4090", 89, 16384, 2520, 165.2),
    Sheet("NVIDIA H100 80GB HBM3", 90, 16896, 1830, 989.4),
    Sheet("NVIDIA H100 PCIe", 90, 14592, 1620, 756),
    Sheet("NVIDIA H200", 90, 16896, 1830, 989.5),
    Sheet("NVIDIA B200", 100, 18944, 1965, 2250, 0.06),
    Sheet("NVIDIA GeForce RTX 5090", 120, 21760, 2407, 209.5),
    # Slower than their architecture; a card without tensor cores; one that is not out yet.
    Sheet("NVIDIA H20", 90, 9984, 1980, None),
    Sheet("NVIDIA H20-3e", 90, 9984, 1980, None),
    Sheet("NVIDIA L20", 89, 11776, 2520, None),
    Sheet("NVIDIA L2", 89, 12032, 2520, None),
    Sheet("NVIDIA A10G", 86, 10240, 1710, None),
    Sheet("NVIDIA T1000", 75, 896, 1395, None),
    Sheet("NVIDIA X1", 137, 40009, 3001, None),
)  # fmt: skip


@pytest.fixture(scope="module")
def facts(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    script = Script(gpus=len(SHEETS))
    for gpu, sheet in enumerate(SHEETS):
        script.lines = [line for line in script.lines if f"text {gpu} name" not in line]
        script.add(f"text {gpu} name {sheet.name}")
        script.value(gpu, "capability", 0, sheet.capability).value(gpu, "cores", 0, sheet.cores)
        script.value(gpu, "max_sm_mhz", 0, sheet.mhz)
    run = sample(driver, script, tmp_path_factory.mktemp("sheets"), 0.3)
    return sorted(run.sampling["gpus"], key=lambda found: int(found["index"]))


@pytest.mark.parametrize("place", range(len(SHEETS)), ids=[sheet.name for sheet in SHEETS])
def test_peak_operations_are_those_of_the_data_sheet(
    facts: list[Mapping[str, Any]], place: int
) -> None:
    sheet, found = SHEETS[place], facts[place]
    assert (found["name"], found["sm_clock_hz"]) == (sheet.name, sheet.mhz * 1_000_000)
    assert found["compute_capability"] == f"{sheet.capability // 10}.{sheet.capability % 10}"
    if sheet.tflops is None:
        assert found["peak_flops_per_s"] is None
    else:
        assert found["peak_flops_per_s"] == pytest.approx(sheet.tflops * 1e12, rel=sheet.tolerance)


def test_what_a_driver_does_not_tell_is_unknown(
    driver: Path, old_driver: Path, tmp_path: Path
) -> None:
    """Each question refused on a device of its own; an old driver cannot count cores."""
    script = Script(gpus=4)
    script.error(1, "nvmlDeviceGetCudaComputeCapability", 3)
    script.error(2, "nvmlDeviceGetMaxClockInfo", 3)
    script.error(3, "nvmlDeviceGetMaxPcieLinkWidth", 3)
    whole, no_capability, no_clock, no_lanes = sample(
        driver, script, tmp_path / "new", 0.3
    ).sampling["gpus"]
    assert whole["peak_flops_per_s"] == pytest.approx(16896 * 1980e6 * 32)
    assert (no_capability["compute_capability"], no_capability["peak_flops_per_s"]) == (None, None)
    assert no_clock["sm_clock_hz"] is no_clock["peak_flops_per_s"] is None
    assert no_clock["peak_bytes_per_s"] is no_clock["memory_clock_hz"] is None
    assert no_clock["compute_capability"] == "9.0"
    assert no_lanes["pcie_bytes_per_s"] is None and no_lanes["peak_flops_per_s"]
    (old,) = sample(old_driver, Script(), tmp_path / "old", 0.3).sampling["gpus"]
    assert (old["sm_clock_hz"], old["peak_flops_per_s"]) == (1_980_000_000, None)


@pytest.mark.parametrize(
    ("generation", "gigabytes"),
    [(1, 4.0), (2, 8.0), (3, 15.754), (4, 31.508), (5, 63.015), (6, 121.0)],
)
def test_pcie_peaks_are_those_that_pci_sig_and_others_publish(
    generation: int, gigabytes: float
) -> None:
    """Of 16 lanes, each way."""
    assert pcie_bytes_per_s(generation, 16) == pytest.approx(gigabytes * 1e9, rel=1e-4)
    assert pcie_bytes_per_s(generation, 4) == pytest.approx(gigabytes * 1e9 / 4, rel=1e-4)


def test_the_link_is_the_one_that_the_driver_names(facts: list[Mapping[str, Any]]) -> None:
    assert facts[0]["pcie_bytes_per_s"] == pytest.approx(63.015e9, rel=1e-4)


def test_peaks_without_their_facts_are_unknown() -> None:
    assert pcie_bytes_per_s(7, 16) is pcie_bytes_per_s(None, 16) is pcie_bytes_per_s(5, 0) is None
    known = ("NVIDIA H100", "9.0", 16896, 1_980_000_000)
    assert peak_flops_per_s(*known) is not None
    for place, missing in ((1, None), (2, None), (2, 0), (3, None), (3, 0)):
        facts = [*known]
        facts[place] = missing
        assert peak_flops_per_s(*facts) is None  # type: ignore[arg-type]
