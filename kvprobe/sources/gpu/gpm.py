"""GPM (GPU Performance Monitoring): bandwidth and activity from counters of the device itself.

From Hopper on. A value is the mean between two samples of the counters, so consecutive samples
leave no time uncovered, however late one of them is. NVML API reference, ``nvmlGpmMetricsGet``:
two samples should be more than 100 ms apart, as the device refreshes its counters at that pace.
Shares come in percent (0 to 100), rates in MiB/s.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from typing import Any

from kvprobe.schema import UNKNOWN
from kvprobe.sources.gpu.reasons import NOT_SUPPORTED
from kvprobe.sources.gpu.rows import RowStore, places_of

LEAST_SPAN_NS = 100_000_000
"""Closer samples show no change."""

_PERCENT = 0.01
_MIB = float(1 << 20)

METRICS = (
    ("GRAPHICS_UTIL", "graphics_activity_share", _PERCENT),
    ("SM_UTIL", "sm_activity_share", _PERCENT),
    ("SM_OCCUPANCY", "sm_occupancy_share", _PERCENT),
    ("ANY_TENSOR_UTIL", "tensor_activity_share", _PERCENT),
    ("DRAM_BW_UTIL", "dram_bandwidth_share", _PERCENT),
    ("PCIE_RX_PER_SEC", "pcie_rx_bytes_per_s", _MIB),
    ("PCIE_TX_PER_SEC", "pcie_tx_bytes_per_s", _MIB),
    ("NVLINK_TOTAL_RX_PER_SEC", "nvlink_rx_bytes_per_s", _MIB),
    ("NVLINK_TOTAL_TX_PER_SEC", "nvlink_tx_bytes_per_s", _MIB),
)
"""Name after NVML_GPM_METRIC_, column, and what one of NVML's units is in the column's."""

_COLUMNS = tuple(column for _, column, _ in METRICS)
_SCALES = tuple(scale for _, _, scale in METRICS)
_PLACES = places_of(_COLUMNS)


def is_supported(nvml: Any, handle: Any) -> bool:
    """Whether the device has GPM.

    Raises:
        pynvml.NVMLError: the driver cannot be asked.
    """
    return bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


class GpmReader:
    """Asks one device, or one MIG GPU instance of it; make it anew when NVML was started again.

    Args:
        nvml: the module pynvml.
        handle: the device.
        subject: device index, and instance id or ``UNKNOWN`` for the whole device.
        rows: where rows go.
        least_ns: a sample that would follow the last one sooner is left to the next call.

    Raises:
        pynvml.NVMLError: there is no memory for the samples, or the driver is too old.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        subject: tuple[int, int],
        rows: RowStore,
        least_ns: int = LEAST_SPAN_NS,
    ) -> None:
        self._least_ns = least_ns
        self._nvml = nvml
        self._handle = handle
        self._subject = subject
        self._rows = rows
        self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._questions = [
            _question(nvml, *samples) for samples in (self._samples, self._samples[::-1])
        ]
        self._answers = _layout(nvml)
        self._first = nvml.c_nvmlGpmMetricsGet_t.metrics.offset
        self._moment: tuple[int, int] | None = None
        self.unsupported: tuple[str, ...] = ()
        """Columns that this device does not have, known after the first row."""

    def ask(self) -> None:
        """Take a sample; with the one before it, add a row. NVML's errors pass through."""
        before = time.monotonic_ns()
        if self._moment is not None and before - self._moment[0] < self._least_ns:
            return
        if self._subject[1] == UNKNOWN:
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[1])
        else:
            self._nvml.nvmlGpmMigSampleGet(self._handle, self._subject[1], self._samples[1])
        half = (time.monotonic_ns() - before) // 2
        moment = (before + half, half)
        if self._moment is not None:
            self._add(self._moment, moment)  # where this fails, the next row covers its time too
        self._moment = moment
        self._samples.reverse()  # the last good sample comes first
        self._questions.reverse()

    def free(self) -> None:
        """Give the samples back; a driver that is gone has forgotten them."""
        for sample in self._samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except self._nvml.NVMLError:
                continue
        self._samples = []

    def _add(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        question = self._questions[0]
        self._nvml.nvmlGpmMetricsGet(question)
        told = self._answers.unpack_from(question, self._first)
        values = []
        for code, value, scale in zip(told[::2], told[1::2], _SCALES, strict=True):
            values.append(math.nan if code else value * scale)
        if any(told[::2]) and not self.unsupported:
            self.unsupported = tuple(
                name
                for name, code in zip(_COLUMNS, told[::2], strict=True)
                if code == NOT_SUPPORTED
            )
        self._rows.add(self._subject, (start[0], end[0]), max(start[1], end[1]), _PLACES, values)


def _question(nvml: Any, first: Any, second: Any) -> Any:
    """What happened between two samples; asked again and again in the same memory."""
    question = nvml.c_nvmlGpmMetricsGet_t()
    question.version = nvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = len(METRICS)
    question.sample1, question.sample2 = first, second
    for place, (name, _, _) in enumerate(METRICS):
        question.metrics[place].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
    return question


def _layout(nvml: Any) -> struct.Struct:
    """Error code and value of each metric in an answered question.

    Read from its memory at once: pynvml's structures cost a Python call for each attribute.
    """
    metric = nvml.c_nvmlGpmMetric_t
    code, value = metric.nvmlReturn.offset, metric.value.offset
    one = f"{code}xi{value - code - 4}xd{ctypes.sizeof(metric) - value - 8}x"
    return struct.Struct("=" + one * len(METRICS))
