"""Reading and writing BPF maps by descriptor, whichever loader made them."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvprobe.bpf.attach import bpf

_LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _LOOKUP_BATCH = 1, 2, 3, 4, 24


def lookup(descriptor: int, key: bytes, value_bytes: int) -> bytes | None:
    """The value under a key, or None.

    Raises:
        OSError: what else the kernel answered.
    """
    where = ctypes.create_string_buffer(key, len(key))
    value = ctypes.create_string_buffer(value_bytes)
    try:
        bpf(_LOOKUP, _attribute(descriptor, where, value))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    return value.raw


def update(descriptor: int, key: bytes, value: bytes) -> None:
    """Set the value under a key.

    Raises:
        OSError: the map is full, or what else the kernel answered.
    """
    where = ctypes.create_string_buffer(key, len(key))
    what = ctypes.create_string_buffer(value, len(value))
    bpf(_UPDATE, _attribute(descriptor, where, what))


def delete(descriptor: int, key: bytes) -> None:
    """Remove a key if it is there."""
    where = ctypes.create_string_buffer(key, len(key))
    try:
        bpf(_DELETE, _attribute(descriptor, where, None))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def keys(descriptor: int, key_bytes: int) -> Iterator[bytes]:
    """Every key of a hash map. Keys that come or go meanwhile may be missed or repeated."""
    after: ctypes.Array[ctypes.c_char] | None = None
    while True:
        found = ctypes.create_string_buffer(key_bytes)
        try:
            bpf(_NEXT_KEY, _attribute(descriptor, after, found))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise
        yield found.raw
        after = found


def per_cpu_u64(descriptor: int, index: int) -> int:
    """The sum over all CPUs of one 64-bit element of a per-CPU array."""
    value = lookup(descriptor, struct.pack("=I", index), 8 * possible_cpus())
    return int(np.frombuffer(value, np.uint64).sum()) if value else 0


def array_element(descriptor: int, index: int, words: int) -> NDArray[np.uint64]:
    """One element of an array map, as 64-bit words."""
    value = lookup(descriptor, struct.pack("=I", index), 8 * words)
    return np.frombuffer(value or bytes(8 * words), np.uint64)


def array_words(descriptor: int, entries: int, words: int) -> NDArray[np.uint64]:
    """A whole array map, one row of 64-bit words per element.

    Raises:
        OSError: the kernel is older than 5.6, or what else it answered.
    """
    names = ctypes.create_string_buffer(4 * entries)
    values = ctypes.create_string_buffer(8 * words * entries)
    position = ctypes.create_string_buffer(4)
    addresses = (0, *(ctypes.addressof(buffer) for buffer in (position, names, values)))
    try:
        bpf(_LOOKUP_BATCH, struct.pack("=QQQQIIQQ", *addresses, entries, descriptor, 0, 0))
    except OSError as error:
        if error.errno != errno.ENOENT:  # the end was reached
            raise
    return np.frombuffer(memoryview(values), np.uint64).reshape(entries, words)


@cache
def possible_cpus() -> int:
    """CPUs that could ever be online: how many values a per-CPU element has."""
    ranges = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")
    return max(int(part.split("-")[-1]) for part in ranges) + 1


def _attribute(
    descriptor: int,
    key: ctypes.Array[ctypes.c_char] | None,
    value: ctypes.Array[ctypes.c_char] | None,
) -> bytes:
    """The leading part of ``union bpf_attr`` for the element commands.

    It holds addresses only: the caller keeps the buffers alive until the call is over.
    """
    return struct.pack(
        "=IIQQQ",
        descriptor,
        0,
        ctypes.addressof(key) if key is not None else 0,
        ctypes.addressof(value) if value is not None else 0,
        0,
    )
