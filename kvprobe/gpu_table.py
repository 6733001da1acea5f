"""The table ``gpu``: what an NVIDIA driver says of its devices, as columns with units.

One row is one answer of the driver: the columns that it filled are known, all others unknown. So
quick and slow metrics keep their own pace, and a metric that a device does not have is null.
"""

from __future__ import annotations

from enum import IntFlag

from kvprobe.columns import Column as _C
from kvprobe.columns import Table


class ClockEvent(IntFlag):
    """Why the clocks are what they are (``clock_events``); bits of nvml.h, nvmlClocksEventReason*.

    ``GPU_IDLE``, ``APPLICATIONS_CLOCKS``, ``SYNC_BOOST`` and ``DISPLAY_CLOCKS`` are choices; the
    others hold a device back that has work to do.
    """

    GPU_IDLE = 0x1
    APPLICATIONS_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE = 0x80
    DISPLAY_CLOCKS = 0x100
    BOARD_LIMIT = 0x200
    RELIABILITY = 0x400


THROTTLING = (
    ClockEvent.SW_POWER_CAP
    | ClockEvent.HW_SLOWDOWN
    | ClockEvent.SW_THERMAL_SLOWDOWN
    | ClockEvent.HW_THERMAL_SLOWDOWN
    | ClockEvent.HW_POWER_BRAKE
    | ClockEvent.BOARD_LIMIT
    | ClockEvent.RELIABILITY
)

GPU = Table(
    "gpu",
    "one answer of the NVIDIA driver about one device; columns that it does not tell are unknown",
    (
        _C("time_ns", "i8", "ns", "end of the time that the row is about, or its moment"),
        _C("start_ns", "i8", "ns", "begin of that time; unknown: a moment, or the driver's choice"),
        _C("uncertainty_ns", "i8", "ns", "how far time_ns may be off: half of the driver's call"),
        _C("gpu", "i8", "", "which device: the index in the facts of the capture"),
        _C("instance", "i8", "", "MIG GPU instance; unknown: the whole device"),
        _C("dram_bandwidth_share", "f8", "1", "DRAM bytes moved, of the most that could be"),
        _C("graphics_activity_share", "f8", "1", "time with some kernel or graphics work running"),
        _C("sm_activity_share", "f8", "1", "time an SM had a warp, mean over the SMs"),
        _C("sm_occupancy_share", "f8", "1", "warps resident, of the most that could be"),
        _C("tensor_activity_share", "f8", "1", "time the tensor cores were busy, mean over SMs"),
        _C("pcie_rx_bytes_per_s", "f8", "B/s", "over PCIe to the device"),
        _C("pcie_tx_bytes_per_s", "f8", "B/s", "over PCIe from the device"),
        _C("nvlink_rx_bytes_per_s", "f8", "B/s", "over all NVLinks to the device"),
        _C("nvlink_tx_bytes_per_s", "f8", "B/s", "over all NVLinks from the device"),
        _C("kernel_time_share", "f8", "1", "time with a kernel running, over 1/6 to 1 s"),
        _C("memory_busy_time_share", "f8", "1", "time device memory was in use: no bandwidth"),
        _C("sm_clock_hz", "f8", "Hz", "SM clock"),
        _C("memory_clock_hz", "f8", "Hz", "memory clock; data moves at twice that rate"),
        _C("clock_events", "i8", "", "why the clocks are so, see ClockEvent; 0: no reason"),
        _C("power_watts", "f8", "W", "of the board; from Ampere on the mean of a second"),
        _C("memory_used_bytes", "i8", "B", "device memory allocated, the driver's part included"),
        _C("ecc_corrected", "i8", "", "corrected memory errors since the driver was loaded"),
        _C("ecc_uncorrected", "i8", "", "uncorrected memory errors since the driver was loaded"),
        _C("xid", "i8", "", "number of an Xid error that the driver reported"),
    ),
)
