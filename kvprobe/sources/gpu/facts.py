"""What a driver says of itself and of its devices, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvprobe.model import GpuFacts
from kvprobe.sources.gpu import gpm
from kvprobe.sources.gpu.peaks import pcie_bytes_per_s, peak_bytes_per_s, peak_flops_per_s
from kvprobe.sources.gpu.reasons import FUNCTION_NOT_FOUND, NOT_SUPPORTED, Remedy, reason_of

T = TypeVar("T")


def facts_of(nvml: Any, handle: Any, index: int) -> GpuFacts:
    """One device. What the driver does not tell is None.

    Raises:
        pynvml.NVMLError: the device is lost, or the driver is.
    """
    memory_hz = _clock_hz(nvml, handle, nvml.NVML_CLOCK_MEM)
    sm_hz = _clock_hz(nvml, handle, nvml.NVML_CLOCK_SM)
    cores = _known(nvml, lambda: nvml.nvmlDeviceGetNumGpuCores(handle))
    bits = _known(nvml, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    memory = _known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    generation = _known(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = _known(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    limit_mw = _known(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    pci = _known(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle))
    mig = _known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    divided = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
    name = _text(nvml.nvmlDeviceGetName(handle)) or "unknown"
    capability = _capability(nvml, handle)
    return GpuFacts(
        index=index,
        name=name,
        uuid=uuid_of(nvml, handle),
        serial=_text(_known(nvml, lambda: nvml.nvmlDeviceGetSerial(handle))),
        pci_address=None if pci is None else _text(pci.busId),
        memory_bytes=None if memory is None else int(memory.total),
        memory_bus_bits=bits,
        memory_clock_hz=memory_hz,
        peak_bytes_per_s=peak_bytes_per_s(memory_hz, bits),
        peak_flops_per_s=peak_flops_per_s(name, capability, cores, sm_hz),
        compute_capability=capability,
        sm_clock_hz=sm_hz,
        pcie_bytes_per_s=pcie_bytes_per_s(generation, lanes),
        pcie_generation=generation,
        pcie_lanes=lanes,
        power_limit_watts=None if limit_mw is None else limit_mw / 1000,
        mig=None if mig is None else divided,
        instances=_instances(nvml, handle) if divided else (),
        gpm=_has_gpm(nvml, handle),
    )


def uuid_of(nvml: Any, handle: Any) -> str | None:
    """What stays the same over a loss of the device and a restart of the driver.

    Raises:
        pynvml.NVMLError: the device is lost, or the driver is.
    """
    return _text(_known(nvml, lambda: nvml.nvmlDeviceGetUUID(handle)))


def version(nvml: Any, question: str) -> str | None:
    """``Driver`` or ``NVML`` version; None where it is not told."""
    return _text(_known(nvml, getattr(nvml, f"nvmlSystemGet{question}Version")))


def _clock_hz(nvml: Any, handle: Any, domain: int) -> int | None:
    """The highest clock of a domain."""
    mhz = _known(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, domain))
    return mhz * 1_000_000 if mhz else None


def _capability(nvml: Any, handle: Any) -> str | None:
    found = _known(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return None if found is None else f"{found[0]}.{found[1]}"


def _has_gpm(nvml: Any, handle: Any) -> bool:
    try:
        return gpm.is_supported(nvml, handle)
    except nvml.NVMLError as error:
        if error.value in (FUNCTION_NOT_FOUND, NOT_SUPPORTED):
            return False
        raise


def _instances(nvml: Any, handle: Any) -> tuple[int, ...]:
    """The MIG GPU instances that have compute instances; several of these share one's counters."""
    found: set[int] = set()
    for place in range(_known(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            found.add(nvml.nvmlDeviceGetGpuInstanceId(part))
        except nvml.NVMLError_NotFound:
            continue  # places need not be filled from the first on
    return tuple(sorted(found))


def _known(nvml: Any, ask: Callable[[], T]) -> T | None:
    """An answer, or None where this device or driver has none."""
    try:
        return ask()
    except nvml.NVMLError as error:
        if reason_of(error.value).remedy in (Remedy.FIND_GPU, Remedy.REOPEN):
            raise
        return None


def _text(value: str | bytes | None) -> str | None:
    """What a driver says, without characters that a terminal would act upon."""
    if value is None:
        return None
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
