"""What an NVMe controller says of itself: limits that sysfs does not show (Identify, CNS 1).

The command only reads. It is sent to controllers that are live and given up after a second, so
that a path in trouble holds nobody up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.nvme import controller_of

BYTES = 4096
"""Of the answer; its layout is that of the NVM Express base specification."""
_ADMIN_COMMAND = 0xC0484E41
"""NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h."""
_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd: opcode, .., address, .., length, cdw10 .. cdw15, timeout, result."""
_IDENTIFY, _CONTROLLER = 0x06, 1
_TIMEOUT_MS = 1000
_PAGE_BYTES = 4096
"""The least page of a controller (CAP.MPSMIN), which hosts can only have as 4 KiB."""

MDTS = Knob(
    "mdts",
    Family.BLOCK_SIZE,
    "B",
    "most data of one command, by the device; larger requests are cut",
    Reach.READ_ONLY,
)
IN_CAPSULE = Knob(
    "in_capsule_size",
    Family.BLOCK_SIZE,
    "B",
    "writes up to this size travel with their command; larger ones wait for the target to ask",
    Reach.READ_ONLY,
)
MOST_COMMANDS = Knob(
    "maxcmd",
    Family.QUEUE_DEPTH,
    "commands",
    "most commands in flight on one queue that the controller wishes",
    Reach.READ_ONLY,
)


def limits(answer: bytes) -> dict[Knob, int | None]:
    """The limits in an answer to Identify; None: the controller states none.

    Bytes 77 (MDTS, a power of two of least pages, 0 is no limit), 514 (MAXCMD) and 1792 (IOCCSZ,
    in 16 bytes, with the 64 of the command; fabrics only).
    """
    mdts = answer[77]
    (most,) = struct.unpack_from("<H", answer, 514)
    (capsule,) = struct.unpack_from("<I", answer, 1792)
    return {
        MDTS: _PAGE_BYTES << mdts if 0 < mdts < 32 else None,
        MOST_COMMANDS: most or None,
        IN_CAPSULE: capsule * 16 - 64 if capsule >= 4 else None,
    }


def identify(node: Path) -> bytes:
    """Ask a controller.

    Raises:
        OSError: no such node, no right to use it, or no answer.
    """
    descriptor = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, BYTES) as answer:
            at = _address(answer)
            words = (_CONTROLLER, 0, 0, 0, 0, 0)
            head = (_IDENTIFY, 0, 0, 0, 0, 0, 0, at, 0, BYTES)
            command = bytearray(_COMMAND.pack(*head, *words, _TIMEOUT_MS, 0))
            status = fcntl.ioctl(descriptor, _ADMIN_COMMAND, command)
            if status:
                raise OSError(f"NVMe status {status:#x}")
            return answer[:]
    finally:
        os.close(descriptor)


def _address(memory: mmap.mmap) -> int:
    import ctypes

    byte = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(byte)
    del byte  # it would keep the memory from being given back
    return address


def _read(subjects: Subjects) -> Iterator[Setting]:
    for name in subjects.controllers:
        found = controller_of(subjects.roots.sysfs / "class/nvme" / name)
        node = subjects.roots.dev / name
        if found.state != "live" or not node.exists():
            continue
        try:
            stated = limits(identify(node))
        except OSError:
            yield setting(MDTS, name, None, node, "the controller does not answer to this user")
            continue
        for knob, value in stated.items():
            if knob is IN_CAPSULE and found.transport == "pcie":
                continue
            text, note = (str(value), "") if value is not None else ("0", "0: no limit is stated")
            yield setting(knob, name, text, node, note)


KIND = KnobKind(
    "nvme_identify", "limits of an NVMe controller", (MDTS, IN_CAPSULE, MOST_COMMANDS), _read
)
