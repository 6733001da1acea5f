"""What each NVML error code means for a sampler: a reason in words, and what to do about it.

Codes are those of nvmlReturn_t (nvml.h, "NVML return values"); they never change their number.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Remedy(Enum):
    """What a sampler does after an error."""

    DROP = "never ask this question again: it has no answer here"
    RETRY = "ask again later"
    FIND_GPU = "the device is gone: go on with the others, look for it now and then"
    REOPEN = "the driver is gone: start NVML again when it is back"


class Reason(NamedTuple):
    """One error code."""

    why: str
    remedy: Remedy
    fix: str = ""


UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
VERSION_MISMATCH = 18

_DROP, _RETRY, _FIND, _REOPEN = Remedy.DROP, Remedy.RETRY, Remedy.FIND_GPU, Remedy.REOPEN

REASONS = {
    UNINITIALIZED: Reason("NVML was shut down or never started", _REOPEN),
    2: Reason("the driver does not know this question for this device", _DROP),
    NOT_SUPPORTED: Reason("this device does not support it", _DROP),
    NO_PERMISSION: Reason(
        "the driver denies it to this user", _DROP,
        "run as root; in a container, add the utility capability of the driver",
    ),
    5: Reason("NVML was started twice", _RETRY),
    6: Reason("the driver found no such object", _DROP),
    7: Reason("the driver's answer is larger than its library said", _DROP),
    8: Reason("the device lacks external power", _RETRY, "check its power cables"),
    9: Reason("the NVIDIA driver is not loaded", _REOPEN, "modprobe nvidia"),
    TIMEOUT: Reason("the driver did not answer in time", _RETRY),
    11: Reason("the driver gets no interrupts from the device", _RETRY, "dmesg | grep NVRM"),
    LIBRARY_NOT_FOUND: Reason("libnvidia-ml.so.1 is not installed", _REOPEN),
    FUNCTION_NOT_FOUND: Reason("this driver is too old to be asked", _DROP, "a newer driver"),
    14: Reason("the device's infoROM is corrupted", _DROP, "nvidia-smi -q"),
    GPU_IS_LOST: Reason("the device fell off the bus or was removed", _FIND, "dmesg | grep Xid"),
    16: Reason("the device needs a reset", _RETRY, "nvidia-smi --gpu-reset, or reboot"),
    17: Reason(
        "the operating system blocks the driver", _RETRY, "is /dev/nvidiactl in this container?"
    ),
    VERSION_MISMATCH: Reason(
        "the driver's library and its kernel module have different versions", _REOPEN,
        "reboot, or reload the module; then start kvprobe again",
    ),
    19: Reason("the device is in use by another program that excludes this", _RETRY),
    20: Reason("the driver is out of memory", _RETRY),
    21: Reason("the driver has no data yet", _RETRY),
    22: Reason("a virtual GPU has no memory error counters", _DROP),
    23: Reason("the driver is out of resources", _RETRY),
    24: Reason("the device does not support this clock", _DROP),
    25: Reason("driver and kvprobe disagree about the form of the question", _DROP,
               "a driver and an nvidia-ml-py of the same year"),
    26: Reason("this driver has given the question up", _DROP),
    27: Reason("the device is not ready", _RETRY),
    28: Reason("no such device is on the bus", _FIND, "lspci -d 10de:"),
    29: Reason("the device is in a state that forbids it", _RETRY),
    30: Reason("the device does not support this reset", _DROP),
    999: Reason("the driver failed inside", _RETRY, "dmesg | grep NVRM"),
}  # fmt: skip


def reason_of(code: int) -> Reason:
    """The reason for an error code; one that is newer than this list may go away by itself."""
    return REASONS.get(code) or Reason(f"NVML error {code}, which kvprobe does not know", _RETRY)
