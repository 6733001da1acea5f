"""From the driver to the report: a capture with devices, one without, and what doctor says."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe import reports
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.reader import open_capture
from kvprobe.capture.redact import redact
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator.gpu.account import gpu_accounts
from kvprobe.correlator.gpu.ledger import GpuAccount
from kvprobe.document import build
from kvprobe.model import Frame, GpuFacts, GpuSampling
from kvprobe.reports.text import render
from kvprobe.schema import GPU, UNKNOWN, ClockEvent
from tests.gpu.standin import GPM, ROOT, Script, environment
from tests.reports.schema_check import errors

SECOND_NS = 1_000_000_000
WHOLE = (0, 1000 * SECOND_NS)
SCHEMA = json.loads((Path(reports.__file__).parent / "document.schema.json").read_text("utf-8"))
FACTS = GpuFacts(
    0, "NVIDIA H100 80GB HBM3", "GPU-secret", "165", peak_bytes_per_s=3e12, instances=(3,),
    memory_bytes=80 << 30,
)  # fmt: skip


def kvprobe(
    *arguments: str, library: Path | None, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvprobe", *arguments],
        cwd=ROOT,
        env=environment(library, script),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def written(folder: Path, gpus: int = 2) -> Path:
    script = Script(gpus=gpus)
    for column in GPM:
        script.gpm_value("*", column, 0, 25)
    script.value("*", "clock_events", 0.001, int(ClockEvent.SW_POWER_CAP))
    path = folder / "script"
    script.write(path, time.monotonic_ns() - SECOND_NS)
    return path


@pytest.mark.root
def test_a_capture_holds_the_devices_and_a_report_shows_them(driver: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.kvcap"
    done = kvprobe(
        "capture", "-d", "3", "-o", str(out), "--redact", "--json",
        library=driver, script=written(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert [gpu["facts"]["index"] for gpu in document["gpus"]] == [0, 1]
    for gpu in document["gpus"]:
        share = gpu["metrics"]["dram_bandwidth_share"]
        assert share["mean"] == pytest.approx(0.25)
        assert share["n"] >= 10
        assert 1.5e9 < share["covered_ns"] < 4e9
        assert gpu["dram_bytes_per_s"] == pytest.approx(0.25 * 3.352e12, rel=1e-3)
        (held,) = gpu["clock_events"]
        assert (held["reason"], held["share"]) == ("sw_power_cap", 1.0)
        assert not gpu["facts"]["uuid"].startswith("GPU-")
        assert not gpu["facts"]["serial"].startswith("165")
    assert list(errors(document, SCHEMA, SCHEMA)) == []
    assert document["capture"]["gpu_driver"] == "570.86.15"
    assert document["losses"]["gpu"]["rows"] > 50
    assert {call["name"] for call in document["cost"]["gpu_calls"]} >= {"GPM", "power"}
    text = kvprobe("report", str(out), library=None).stdout
    assert "GPU 1  NVIDIA H100 80GB HBM3" in text
    assert "25.0 % of the peak on average" in text
    assert "sw power cap 100 % of the time" in text
    with open_capture(out) as capture:
        frame = capture.frame("gpu")
        assert set(frame["gpu"]) == {0, 1}
        known = frame["dram_bandwidth_share"][~np.isnan(frame["dram_bandwidth_share"])]
        assert known == pytest.approx(0.25)


def test_doctor_says_what_is_sampled_and_what_is_not(driver: Path, tmp_path: Path) -> None:
    script = Script().error(0, "nvmlDeviceGetPowerUsage", 4)
    script.write(tmp_path / "script", time.monotonic_ns())
    done = kvprobe("doctor", "--json", library=driver, script=tmp_path / "script")
    (found,) = (f for f in json.loads(done.stdout)["features"] if f["group"] == "GPU")
    assert found["name"] == "GPU 0"
    assert "NVIDIA H100 80GB HBM3, 79.6 GiB, memory peak 3.05 TiB/s" in found["why"]
    # 16,896 cores x 1980 MHz x 32 operations.
    assert "16-bit peak 1071 TFLOPS, driver 570.86.15" in found["why"]
    assert "power: the driver denies it to this user" in found["effect"]
    assert found["fix"].startswith("run as root")


def test_a_device_that_is_denied_is_not_said_to_be_absent(driver: Path, tmp_path: Path) -> None:
    script = Script().error("*", "nvmlDeviceGetHandleByIndex_v2", 4)
    script.write(tmp_path / "script", time.monotonic_ns())
    done = kvprobe("doctor", "--json", library=driver, script=tmp_path / "script")
    (found,) = (f for f in json.loads(done.stdout)["features"] if f["group"] == "GPU")
    assert found["why"].startswith("GPU 0 cannot be reached: the driver denies it to this user")
    assert "run as root" in found["why"]


def test_a_name_cannot_reach_the_terminal(driver: Path, tmp_path: Path) -> None:
    script = Script()
    script.lines = [line.replace("NVIDIA H100", "\x1b[31mH100") for line in script.lines]
    script.write(tmp_path / "script", time.monotonic_ns())
    done = kvprobe("doctor", library=driver, script=tmp_path / "script")
    assert "[31mH100" in done.stdout
    assert "\x1b[31mH100" not in done.stdout


def test_doctor_needs_one_line_without_a_device(tmp_path: Path) -> None:
    done = kvprobe("doctor", "--json", library=None)
    (found,) = (f for f in json.loads(done.stdout)["features"] if f["group"] == "GPU")
    assert (found["state"], found["why"]) == ("absent", "libnvidia-ml.so.1 is not installed")


# ---------------------------------------------------------------- the account alone


def gpu_frame(*rows: Mapping[str, float]) -> Frame:
    found: Frame = {}
    for column in GPU.columns:
        whole = column.dtype == "i8"
        values = [row.get(column.name, UNKNOWN if whole else np.nan) for row in rows]
        found[column.name] = np.array(values, np.int64 if whole else np.float64)
    return found


def account(*rows: Mapping[str, float], instance: int = 0) -> GpuAccount:
    frame = gpu_frame(*({"gpu": 0, **row} for row in rows))
    return gpu_accounts(frame, GpuSampling((FACTS,)), WHOLE)[instance][0]


def spanning(start_s: float, end_s: float, share: float, **more: float) -> dict[str, float]:
    times = {"start_ns": int(start_s * 1e9), "time_ns": int(end_s * 1e9)}
    return {**times, "dram_bandwidth_share": share, **more}


def test_a_long_stretch_weighs_more_than_a_short_one() -> None:
    found = account(spanning(0, 3, 0.2), spanning(3, 4, 0.8))
    share = found.metrics["dram_bandwidth_share"]
    assert share.mean == pytest.approx(0.35)
    assert (share.p95, share.highest, share.n, share.covered_ns) == (0.8, 0.8, 2, 4 * SECOND_NS)
    assert found.dram_bytes_per_s == pytest.approx(0.35 * 3e12)
    mostly = account(spanning(0, 97, 0.1), spanning(97, 100, 0.9)).metrics
    assert mostly["dram_bandwidth_share"].p95 == 0.1


def test_what_was_never_told_is_absent_not_zero() -> None:
    found = account(spanning(0, 1, 0.2))
    assert set(found.metrics) == {"dram_bandwidth_share"}
    assert (found.clock_events, found.ecc_corrected, found.xids) == ((), None, ())
    assert gpu_accounts(gpu_frame(spanning(0, 1, 0.2)), None, WHOLE) == ()


def test_instances_are_apart_and_have_no_bytes() -> None:
    rows = (spanning(0, 1, 0.2), spanning(0, 1, 0.7, instance=3), spanning(0, 1, 0.9, gpu=5))
    assert account(*rows).metrics["dram_bandwidth_share"].mean == pytest.approx(0.2)
    part = account(*rows, instance=1)
    assert (part.instance, part.dram_bytes_per_s) == (3, None)
    assert part.metrics["dram_bandwidth_share"].mean == pytest.approx(0.7)


def test_clock_events_are_shares_of_readings_and_errors_those_of_the_window() -> None:
    bits = [0, 0x4, 0x4 | 0x40, 0x1]
    found = account(
        *({"time_ns": n, "clock_events": each} for n, each in enumerate(bits)),
        {"time_ns": 7, "ecc_corrected": 13}, {"time_ns": 8, "ecc_corrected": 18},
        {"time_ns": 9, "ecc_corrected": 2}, {"time_ns": 10, "xid": 79},
    )  # fmt: skip
    shares = {held.reason: (held.share, held.n) for held in found.clock_events}
    assert shares == {
        "gpu_idle": (0.25, 4), "sw_power_cap": (0.5, 4), "hw_thermal_slowdown": (0.25, 4),
        "none": (0.25, 4),
    }  # fmt: skip
    assert found.ecc_corrected == 5 + 2
    assert [(xid.time_ns, xid.number) for xid in found.xids] == [(10, 79)]


def manifest(sampling: GpuSampling | None) -> Manifest:
    return Manifest("0", "id", 0, 10 * SECOND_NS, Clock(0), complete=True, gpu=sampling)


def text_of(sampling: GpuSampling | None, *rows: dict[str, float]) -> str:
    return render(build(FixedTables(manifest(sampling), {"gpu": gpu_frame(*rows)})), width=120)


def test_the_text_is_silent_without_a_device_and_says_why_one_is_blind() -> None:
    assert "GPU" not in text_of(None)
    assert "GPU" not in text_of(GpuSampling(why_none="libnvidia-ml.so.1 is not installed"))
    blind = text_of(GpuSampling(why_none="the NVIDIA driver is not loaded", expected=True))
    assert "GPUs were not sampled: the NVIDIA driver is not loaded" in blind


def test_the_text_never_makes_bandwidth_of_busy_time() -> None:
    row = {"gpu": 0, "time_ns": 5, "kernel_time_share": 0.8, "memory_busy_time_share": 0.4}
    text = text_of(GpuSampling((FACTS,)), row)
    assert "unknown, peak 2.73 TiB/s" in text
    assert "memory in use 40.0 %, p95 40.0 %, which is no bandwidth" in " ".join(text.split())


def test_redaction_hides_uuid_and_serial(tmp_path: Path) -> None:
    from kvprobe.capture.archive import write_archive

    source = tmp_path / "plain.kvcap"
    write_archive(source, manifest(GpuSampling((FACTS,))), {"gpu": iter([gpu_frame({"gpu": 0})])})
    hidden = redact(source, tmp_path / "hidden.kvcap").gpu
    assert hidden is not None
    assert hidden.gpus[0].uuid not in (None, FACTS.uuid)
    assert hidden.gpus[0].serial not in (None, FACTS.serial)
    assert hidden.gpus[0].name == FACTS.name
