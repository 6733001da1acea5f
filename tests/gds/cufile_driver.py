"""A program that uses libcufile: commands from standard input, one JSON line for each.

Run by path with a bare interpreter, so that it is a process as an engine would be one. A command
is JSON, ``{"do": name, ..}``; the answer says what was done and when (CLOCK_MONOTONIC), measured
just around each call.
"""

import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any


class Descriptor(ctypes.Structure):
    """``CUfileDescr_t``."""

    _fields_ = (("type", ctypes.c_int), ("fd", ctypes.c_void_p), ("ops", ctypes.c_void_p))


class Error(ctypes.Structure):
    """``CUfileError_t``."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class Parameters(ctypes.Structure):
    """``CUfileIOParams_t``."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("base", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("base_offset", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("fh", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class Event(ctypes.Structure):
    """``CUfileIOEvents_t``; ``ret`` is a size_t there."""

    _fields_ = (("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("ret", ctypes.c_ssize_t))


LIBRARY = ctypes.CDLL(sys.argv[1])
LIBRARY.cuFileRead.restype = LIBRARY.cuFileWrite.restype = ctypes.c_ssize_t
_TRANSFER = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64)
LIBRARY.cuFileRead.argtypes = LIBRARY.cuFileWrite.argtypes = _TRANSFER
for name in (
    "HandleRegister",
    "ReadAsync",
    "WriteAsync",
    "BatchIOSetUp",
    "BatchIOSubmit",
    "BatchIOGetStatus",
):
    getattr(LIBRARY, f"cuFile{name}").restype = Error
_PAGES = mmap.mmap(-1, 8 << 20)
BUFFER = (ctypes.c_char * len(_PAGES)).from_buffer(_PAGES)
"""On whole pages, for direct I/O."""
HANDLES: dict[str, ctypes.c_void_p] = {}
DESCRIPTORS: dict[str, int] = {}


def register(name: str, path: str, flags: int = os.O_RDWR) -> dict[str, Any]:
    """Open a file and register it."""
    DESCRIPTORS[name] = os.open(path, flags)
    HANDLES[name] = handle = ctypes.c_void_p()
    asked = Descriptor(1, DESCRIPTORS[name], None)
    error = LIBRARY.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(asked))
    return {"error": error.err, "address": handle.value}


def deregister(name: str) -> dict[str, Any]:
    """Give a handle back and close its file."""
    LIBRARY.cuFileHandleDeregister(HANDLES.pop(name))
    os.close(DESCRIPTORS.pop(name))
    return {}


def transfer(name: str, places: list[tuple[int, int]], write: bool = False) -> dict[str, Any]:
    """One synchronous call for each (offset, size)."""
    call = LIBRARY.cuFileWrite if write else LIBRARY.cuFileRead
    done = []
    for offset, size in places:
        before = time.monotonic_ns()
        result = call(HANDLES[name], ctypes.addressof(BUFFER), size, offset, 0)
        done.append((before, time.monotonic_ns(), result))
    return {"done": done}


def stream(name: str, places: list[tuple[int, int]], write: bool = False) -> dict[str, Any]:
    """One asynchronous call for each (offset, size)."""
    call = LIBRARY.cuFileWriteAsync if write else LIBRARY.cuFileReadAsync
    for offset, size in places:
        numbers = [ctypes.c_int64(n) for n in (size, offset, 0, 0)]
        call(HANDLES[name], ctypes.byref(BUFFER), *map(ctypes.byref, numbers), None)
    return {}


def batch(
    name: str,
    places: list[tuple[int, int]],
    write: bool = False,
    reap: int = 0,
    flags: int = 0,
    same_cookie: bool = False,
) -> dict[str, Any]:
    """One batch with a transfer for each (offset, size); then ``reap`` events asked for at a time.

    Tells, for each event of a transfer that is over, when it was submitted and told, and its
    result. The stand-in refuses flags.
    """
    handle = ctypes.c_void_p()
    LIBRARY.cuFileBatchIOSetUp(ctypes.byref(handle), len(places))
    asked = (Parameters * len(places))(
        *(
            Parameters(
                1, ctypes.addressof(BUFFER), offset, 0, size, HANDLES[name], write,
                7 if same_cookie else 1000 + place,
            )
            for place, (offset, size) in enumerate(places)
        )
    )  # fmt: skip
    before = time.monotonic_ns()
    LIBRARY.cuFileBatchIOSubmit(handle, len(places), asked, flags)
    done: list[tuple[int, int, int]] = []
    events = (Event * len(places))()
    while reap and len(done) < len(places):
        count = ctypes.c_uint(reap)
        LIBRARY.cuFileBatchIOGetStatus(handle, 1, ctypes.byref(count), events, None)
        told = [event for event in events[: count.value] if event.status > 3]
        done += [(before, time.monotonic_ns(), event.ret) for event in told]
    LIBRARY.cuFileBatchIODestroy(handle)
    return {"done": done}


def plain(path: str, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Reads by the engine itself, beside the library."""
    descriptor = os.open(path, os.O_RDONLY)
    for offset, size in places:
        os.pread(descriptor, size, offset)
    os.close(descriptor)
    return {}


COMMANDS = {f.__name__: f for f in (register, deregister, transfer, stream, batch, plain)}


def main() -> None:
    """Answer until standard input ends."""
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(COMMANDS[command.pop("do")](**command)), flush=True)


if __name__ == "__main__":
    main()
