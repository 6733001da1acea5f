"""Xid errors, which the driver reports as events."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvprobe.sources.gpu.device import Device
from kvprobe.sources.gpu.rows import RowStore, places_of

_PLACES = places_of(["xid"])
_MOST = 1000
"""Events taken in one go: a device in distress can have no end of them."""
_WAIT_MS = 1


class XidEvents:
    """The Xid errors of some devices; make it anew when NVML was started again.

    Args:
        nvml: the module pynvml.
        devices: whose errors; a device that has no such events is left out.
        rows: where rows go.

    Raises:
        pynvml.NVMLError: the driver has no events.
    """

    def __init__(self, nvml: Any, devices: Sequence[Device], rows: RowStore) -> None:
        self._nvml = nvml
        self._rows = rows
        self._asked_ns = time.monotonic_ns()
        self._lock = threading.Lock()
        self._set = nvml.nvmlEventSetCreate()
        self._gpus: dict[int | None, int] = {}
        for device in devices:
            try:
                nvml.nvmlDeviceRegisterEvents(
                    device.handle, nvml.nvmlEventTypeXidCriticalError, self._set
                )
            except nvml.NVMLError:
                continue
            self._gpus[_address(device.handle)] = device.facts.index

    def ask(self) -> bool:
        """Add a row for each error since the last call; False: the driver cannot be asked."""
        with self._lock:
            return self._set is not None and self._drain()

    def free(self) -> None:
        """Give the set back, as soon as nobody waits for it."""
        with self._lock:
            if self._set is None:
                return
            with suppress(self._nvml.NVMLError):  # a driver that is gone has forgotten it
                self._nvml.nvmlEventSetFree(self._set)
            self._set = None

    def _drain(self) -> bool:
        for _ in range(_MOST if self._gpus else 0):
            started = self._asked_ns
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, _WAIT_MS)
            except self._nvml.NVMLError_Timeout:
                break
            except self._nvml.NVMLError:
                return False
            gpu = self._gpus.get(_address(event.device))
            if gpu is not None and event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                now = time.monotonic_ns()
                # Instances are 0xFFFFFFFF where the error is of the whole device.
                instance = event.gpuInstanceId if event.gpuInstanceId < 1 << 31 else -1
                subject = (gpu, instance)
                self._rows.add(subject, (started, now), 0, _PLACES, (event.eventData,))
        self._asked_ns = time.monotonic_ns()
        return True


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
