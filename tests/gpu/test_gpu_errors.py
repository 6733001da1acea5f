"""Each NVML error code: a reason in words, and what the sampler does about it."""

import re
from pathlib import Path

import pynvml

from kvprobe.sources.gpu.reasons import REASONS, Remedy, reason_of
from tests.gpu.standin import Script, sample, sample_all

CODES = sorted(
    value for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
)  # fmt: skip
PROBED = "nvmlDeviceGetPowerUsage"


def test_every_code_has_a_reason_of_its_own() -> None:
    assert sorted(REASONS) == CODES
    assert len({reason.why for reason in REASONS.values()}) == len(CODES)
    for reason in REASONS.values():
        assert not re.search(r"NVML_|\berror \d", reason.why), reason.why
    newer = reason_of(31)
    assert "31" in newer.why and newer.remedy is Remedy.RETRY


def remedies(remedy: Remedy) -> list[int]:
    return [code for code in CODES if reason_of(code).remedy is remedy]


def test_a_question_without_an_answer_is_not_asked_again(driver: Path, tmp_path: Path) -> None:
    """A device for each code that says so; all of them in one run."""
    codes = remedies(Remedy.DROP)
    script = Script(gpus=len(codes))
    for gpu, code in enumerate(codes):
        script.error(gpu, PROBED, code)
    run = sample(driver, script, tmp_path, 2.2)
    for gpu, code in enumerate(codes):
        assert run.gaps(gpu) == {"power": reason_of(code).why}
        assert len(run.of("sm_clock_hz", gpu)) >= 2  # the others go on
    assert run.call("power")["calls"] == run.call("power")["failed"] == len(codes)
    assert run.sampling["notes"] == []


def test_what_may_pass_is_asked_again(driver: Path, tmp_path: Path) -> None:
    codes = remedies(Remedy.RETRY)
    script = Script(gpus=len(codes))
    for gpu, code in enumerate(codes):
        script.error(gpu, PROBED, code, to_s=1.0)
    run = sample(driver, script, tmp_path, 3.2)
    for gpu in range(len(codes)):
        assert run.gaps(gpu) == {}
        rows = run.of("power_watts", gpu)
        assert len(rows) >= 1
        assert run.seconds(rows).min() >= 1.0
        assert len(run.of("sm_clock_hz", gpu)) >= 3


def test_a_device_that_is_lost_costs_the_others_nothing_and_is_found_again(
    driver: Path, tmp_path: Path
) -> None:
    """As after an unplug: every question about it fails; later it is back."""
    scripts = {
        code: Script(gpus=3).error(1, "*", code, 0.8, 1.9) for code in remedies(Remedy.FIND_GPU)
    }
    for code, run in sample_all(driver, scripts, tmp_path, 4.2).items():
        lost = run.seconds(run.of("dram_bandwidth_share", 1))
        assert not ((lost > 0.85) & (lost < 1.9)).any()
        assert (lost < 0.8).any() and (lost > 1.9).any()
        for gpu in (0, 2):
            spans = run.of("dram_bandwidth_share", gpu)
            assert (spans["start_ns"][1:] == spans["time_ns"][:-1]).all()
            assert len(spans) >= 25
        assert [gpu["index"] for gpu in run.sampling["gpus"]] == [0, 1, 2]
        notes = run.sampling["notes"]
        assert sum("GPU 1 was lost: " + reason_of(code).why in note for note in notes) == 1
        assert any("GPU 1 (NVIDIA H100 80GB HBM3) is sampled again" in note for note in notes)


def test_a_driver_that_restarts_is_found_again(driver: Path, tmp_path: Path) -> None:
    """Everything fails, NVML has to be started again, and handles from before are no good."""
    scripts = {
        code: Script(gpus=2).error("*", "*", code, 0.7, 1.5) for code in remedies(Remedy.REOPEN)
    }
    for code, run in sample_all(driver, scripts, tmp_path, 5).items():
        for gpu in (0, 1):
            at = run.seconds(run.of("dram_bandwidth_share", gpu))
            assert (at < 0.7).any() and (at > 1.5).any()
            assert not ((at > 0.75) & (at < 1.5)).any()
            assert run.gaps(gpu) == {}
        notes = run.sampling["notes"]
        lost = f"the NVIDIA driver was lost: {reason_of(code).why}"
        assert sum(lost in note for note in notes) == 1
        assert sum("the NVIDIA driver is back" in note for note in notes) == 1
        assert not any("GPU 0 was lost" in note for note in notes)


def test_a_driver_that_cannot_be_asked_is_a_reason(driver: Path, tmp_path: Path) -> None:
    scripts = {code: Script().error("*", "nvmlInitWithFlags", code) for code in (4, 9, 17, 18, 999)}
    for code, run in sample_all(driver, scripts, tmp_path, 1.2).items():
        assert len(run.rows) == 0
        assert run.sampling["gpus"] == []
        assert run.sampling["why_none"].startswith(reason_of(code).why)
        assert run.sampling["expected"]


def test_a_driver_that_comes_late_is_found(driver: Path, tmp_path: Path) -> None:
    run = sample(driver, Script().error("*", "nvmlInitWithFlags", 9, to_s=0.5), tmp_path, 3.5)
    assert run.seconds(run.of("power_watts")).min() > 0.5
    assert run.sampling["why_none"] is None


def test_without_the_library_there_is_a_reason_and_no_cost(tmp_path: Path) -> None:
    run = sample(None, Script(), tmp_path, 1.0)
    assert len(run.rows) == 0
    assert run.sampling["why_none"] == "libnvidia-ml.so.1 is not installed"
    assert not run.sampling["expected"]
    assert run.call("watch")["calls"] == 1


def test_without_devices_there_is_a_reason(driver: Path, tmp_path: Path) -> None:
    run = sample(driver, Script(gpus=0), tmp_path, 1.0)
    assert run.sampling["why_none"] == "the NVIDIA driver has no device"
    assert not run.sampling["expected"]


def test_a_device_that_is_plugged_in_later_is_sampled(driver: Path, tmp_path: Path) -> None:
    script = Script(gpus=2)
    script.lines.remove("count 0 2")
    run = sample(driver, script.add("count 0 1", "count 0.5 2"), tmp_path, 4)
    assert len(run.of("power_watts", 0)) >= 4
    assert run.seconds(run.of("power_watts", 1)).min() > 0.5


def test_a_device_that_cannot_be_reached_is_told(driver: Path, tmp_path: Path) -> None:
    script = Script(gpus=2).error(0, "nvmlDeviceGetHandleByIndex_v2", 8)
    run = sample(driver, script, tmp_path, 1.5)
    assert [gpu["index"] for gpu in run.sampling["gpus"]] == [1]
    (note,) = run.sampling["notes"]
    assert "GPU 0 cannot be reached: the device lacks external power" in note
