"""The stand-in driver: how it is built, how its script is written, how a sampler runs on it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "nvml_standin.c"
GPM = {
    "graphics_activity_share": 1, "sm_activity_share": 2, "sm_occupancy_share": 3,
    "tensor_activity_share": 5, "dram_bandwidth_share": 10, "pcie_tx_bytes_per_s": 20,
    "pcie_rx_bytes_per_s": 21, "nvlink_rx_bytes_per_s": 60, "nvlink_tx_bytes_per_s": 61,
}  # fmt: skip
"""Ids of nvmlGpmMetricId_t, by the columns that they are to fill."""


def build(folder: Path, *flags: str) -> Path:
    """Compile the library into ``folder``; returns the folder, for the loader's search path."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-Wall", *flags, SOURCE, "-o",
         folder / "libnvidia-ml.so.1"],
        check=True,
    )  # fmt: skip
    return folder


@dataclass
class Script:
    """Lines of a script; ``nvml_standin.c`` says what they mean."""

    gpus: int = 1
    gpm: bool = True
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add("text * driver 570.86.15", "text * nvml 12.570.86.15", f"count 0 {self.gpus}")
        for gpu in range(self.gpus):
            self.add(
                f"text {gpu} name NVIDIA H100 80GB HBM3",
                f"text {gpu} uuid GPU-0f3c91a2-0000-0000-0000-00000000000{gpu}",
                f"text {gpu} serial 165012345678{gpu}",
                f"text {gpu} busid 00000000:1{gpu}:00.0",
            )
        for key, number in (
            ("gpm", int(self.gpm)), ("bus_bits", 5120), ("max_memory_mhz", 2619),
            ("memory_mhz", 2619), ("sm_mhz", 1755), ("max_sm_mhz", 1980), ("cores", 16896),
            ("capability", 90), ("power_mw", 312_345),
            ("power_limit_mw", 700_000), ("pcie_generation", 5), ("pcie_lanes", 16),
            ("clock_events", 0), ("memory_total", 85_520_809_984), ("memory_used", 61_000_000_007),
            ("ecc_corrected", 13), ("ecc_uncorrected", 2), ("mig", 0),
        ):  # fmt: skip
            self.value("*", key, 0, number)

    def add(self, *lines: str) -> "Script":
        self.lines += lines
        return self

    def value(self, gpu: int | str, key: str, at_s: float, number: float) -> "Script":
        return self.add(f"value {gpu} {key} {at_s} {number}")

    def gpm_value(self, gpu: int | str, column: str, at_s: float, number: float) -> "Script":
        return self.value(gpu, f"gpm{GPM[column]}", at_s, number)

    def error(
        self, gpu: int | str, function: str, code: int, from_s: float = 0, to_s: float = 1e6
    ) -> "Script":
        return self.add(f"error {gpu} {function} {from_s} {to_s} {code}")

    def slow(
        self, gpu: int | str, function: str, ms: float, from_s: float = 0, to_s: float = 1e6
    ) -> "Script":
        return self.add(f"slow {gpu} {function} {from_s} {to_s} {ms}")

    def write(self, path: Path, epoch_ns: int | None = None) -> None:
        """Write it whole, or without its begin."""
        epoch = [] if epoch_ns is None else [f"epoch {epoch_ns}"]
        path.write_text("\n".join([*epoch, *self.lines]) + "\n", encoding="ascii")


@dataclass(frozen=True)
class Run:
    """What a sampler delivered: rows, what it says of itself, and the script's time 0."""

    rows: NDArray[np.void]
    sampling: Mapping[str, Any]
    cpu_share: float
    close_s: float
    epoch_ns: int

    def of(self, column: str, gpu: int = 0, instance: int = -1) -> NDArray[np.void]:
        """The rows of one device that know this column."""
        known = self.rows[column]
        known = known != -1 if known.dtype.kind == "i" else ~np.isnan(known)
        mine = (self.rows["gpu"] == gpu) & (self.rows["instance"] == instance)
        found: NDArray[np.void] = self.rows[known & mine]
        return found

    def seconds(self, rows: NDArray[np.void], column: str = "time_ns") -> NDArray[np.float64]:
        """A time column in the script's time."""
        return (rows[column] - self.epoch_ns) / 1e9

    def call(self, name: str) -> Mapping[str, Any]:
        """What asking for this cost."""
        found: Mapping[str, Any] = next(c for c in self.sampling["calls"] if c["name"] == name)
        return found

    def gaps(self, gpu: int = 0) -> dict[str, str]:
        """What a device did not answer, and why."""
        facts = next(g for g in self.sampling["gpus"] if g["index"] == gpu)
        return {gap["what"]: gap["why"] for gap in facts["not_sampled"]}


def environment(
    library: Path | None, script: Path | None = None, log: Path | None = None
) -> dict[str, str]:
    """For a process that is to find the stand-in, or no driver at all.

    ``log`` is one that grows: what a workload writes as it runs.
    """
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    if library is not None:
        settings["LD_LIBRARY_PATH"] = str(library)
    if script is not None:
        settings["NVML_STANDIN_SCRIPT"] = str(script)
    if log is not None:
        settings["NVML_STANDIN_LOG"] = str(log)
    return settings


def sample_all(
    library: Path | None, scripts: Mapping[Any, Script], folder: Path, seconds: float
) -> dict[Any, Run]:
    """``sample`` for each script, at the same time."""
    with ThreadPoolExecutor(len(scripts)) as pool:
        runs = {
            name: pool.submit(sample, library, script, folder / str(name), seconds)
            for name, script in scripts.items()
        }
    return {name: run.result() for name, run in runs.items()}


def sample(
    library: Path | None,
    script: Script,
    folder: Path,
    seconds: float,
    interval_ms: float = 125,
) -> Run:
    """Sample from the start of the script for so long; ``library`` None: without a driver."""
    folder.mkdir(parents=True, exist_ok=True)
    script.write(folder / "lines")
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.sample_run", folder, str(seconds),
         str(int(interval_ms * 1e6))],
        check=True,
        cwd=ROOT,
        env=environment(library, folder / "script"),
        timeout=seconds + 60,
    )  # fmt: skip
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return Run(np.load(folder / "rows.npy"), **facts)
