"""Questions that NVML answers with one call: clocks, clock events, power, memory, ECC, PCIe.

Units as documented in the NVML API reference, "Device Queries": clocks in MHz, power in mW (from
Ampere on, except GA100, the mean of one second), memory in bytes, utilisation in percent of a
period of 1/6 to 1 s that the driver chooses, PCIe throughput in KB/s over the 20 ms that the call
takes. KB is read as 1024 bytes, as nvidia-smi and nvitop do; were it 1000, rates are 2.4 % less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.schema import UNKNOWN
from kvprobe.sources.gpu.rows import RowStore, places_of

Handle = Any
Nvml = Any
"""The module pynvml."""

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Reading:
    """One question.

    ``interval_ns`` None: as often as the sampler can. ``spans`` says that the answer is about the
    time of the call. ``without`` is what is not known where there is no answer.
    """

    name: str
    columns: tuple[str, ...]
    ask: Callable[[Nvml, Handle], Sequence[float]]
    without: str
    interval_ns: int | None = None
    spans: bool = False


def _clock_events(nvml: Nvml, handle: Handle) -> Sequence[float]:
    try:
        return (nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)
    except nvml.NVMLError_FunctionNotFound:  # the same question before driver 535
        return (nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _utilisation(nvml: Nvml, handle: Handle) -> Sequence[float]:
    found = nvml.nvmlDeviceGetUtilizationRates(handle)
    return found.gpu / 100, found.memory / 100


def _pcie(counter: str) -> Callable[[Nvml, Handle], Sequence[float]]:
    def ask(nvml: Nvml, handle: Handle) -> Sequence[float]:
        return (nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, counter)) * 1024,)

    return ask


def _clock(domain: str) -> Callable[[Nvml, Handle], Sequence[float]]:
    def ask(nvml: Nvml, handle: Handle) -> Sequence[float]:
        return (nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, domain)) * 1e6,)

    return ask


def _ecc(severity: str) -> Callable[[Nvml, Handle], Sequence[float]]:
    def ask(nvml: Nvml, handle: Handle) -> Sequence[float]:
        kind = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{severity}")
        return (nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC),)

    return ask


ALWAYS = (
    Reading(
        "clock events", ("clock_events",), _clock_events,
        "whether the device was held back", SECOND_NS // 4,
    ),
    Reading("SM clock", ("sm_clock_hz",), _clock("NVML_CLOCK_SM"), "the SM clock", SECOND_NS),
    Reading(
        "memory clock", ("memory_clock_hz",), _clock("NVML_CLOCK_MEM"),
        "the memory clock", SECOND_NS,
    ),
    Reading(
        "power", ("power_watts",),
        lambda nvml, handle: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,),
        "power", SECOND_NS,
    ),
    Reading(
        "memory", ("memory_used_bytes",),
        lambda nvml, handle: (nvml.nvmlDeviceGetMemoryInfo(handle).used,),
        "device memory in use", SECOND_NS,
    ),
    Reading(
        "corrected ECC errors", ("ecc_corrected",), _ecc("CORRECTED"),
        "corrected memory errors", 10 * SECOND_NS,
    ),
    Reading(
        "uncorrected ECC errors", ("ecc_uncorrected",), _ecc("UNCORRECTED"),
        "uncorrected memory errors", 10 * SECOND_NS,
    ),
)  # fmt: skip
"""Asked of every device."""

WITHOUT_GPM = (
    Reading(
        "utilisation", ("kernel_time_share", "memory_busy_time_share"), _utilisation,
        "whether a kernel ran", SECOND_NS // 4,
    ),
    Reading(
        "PCIe to the device", ("pcie_rx_bytes_per_s",), _pcie("NVML_PCIE_UTIL_RX_BYTES"),
        "PCIe traffic", SECOND_NS, spans=True,
    ),
    Reading(
        "PCIe from the device", ("pcie_tx_bytes_per_s",), _pcie("NVML_PCIE_UTIL_TX_BYTES"),
        "PCIe traffic", SECOND_NS, spans=True,
    ),
)  # fmt: skip
"""Asked only of a device without GPM, which tells the same and more without waiting.

The driver chooses a period for utilisation, and PCIe counts block for 20 ms: seldom is enough.
"""


def reader(
    reading: Reading, nvml: Nvml, handle: Handle, gpu: int, rows: RowStore
) -> Callable[[], None]:
    """Make the call that asks once and adds a row; NVML's errors pass through."""
    places = places_of(reading.columns)
    subject = (gpu, UNKNOWN)

    def ask() -> None:
        before = time.monotonic_ns()
        values = reading.ask(nvml, handle)
        after = time.monotonic_ns()
        if reading.spans:
            rows.add(subject, (before, after), 0, places, values)
        else:
            half = (after - before) // 2
            rows.add(subject, (UNKNOWN, before + half), half, places, values)

    return ask
