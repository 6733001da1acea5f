"""The few functions of libbpf.so.1 that loading an object takes, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvprobe.errors import ExitCode, KvprobeError

LIBRARY = "libbpf.so.1"
_LONGEST_LOG = 1 << 24
"""The verifier's log is one message, and its last line says what is wrong."""

_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _TEXT, _POINTER)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bpf_object__open_mem": (_POINTER, (_POINTER, ctypes.c_size_t, _POINTER)),
    "bpf_object__load": (ctypes.c_int, (_POINTER,)),
    "bpf_object__close": (None, (_POINTER,)),
    "bpf_object__next_program": (_POINTER, (_POINTER, _POINTER)),
    "bpf_object__next_map": (_POINTER, (_POINTER, _POINTER)),
    "bpf_program__name": (_TEXT, (_POINTER,)),
    "bpf_program__fd": (ctypes.c_int, (_POINTER,)),
    "bpf_program__set_autoload": (ctypes.c_int, (_POINTER, ctypes.c_bool)),
    "bpf_map__name": (_TEXT, (_POINTER,)),
    "bpf_map__fd": (ctypes.c_int, (_POINTER,)),
    "bpf_map__set_max_entries": (ctypes.c_int, (_POINTER, ctypes.c_uint32)),
    "bpf_map__set_autocreate": (ctypes.c_int, (_POINTER, ctypes.c_bool)),
    "bpf_map__set_initial_value": (ctypes.c_int, (_POINTER, _TEXT, ctypes.c_size_t)),
    "libbpf_set_print": (_POINTER, (_PRINT,)),
}


@cache
def library() -> Any:
    """The loaded library with its signatures set.

    Raises:
        KvprobeError: it is not installed, or lacks a function.
    """
    try:
        loaded = ctypes.CDLL(LIBRARY, use_errno=True)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KvprobeError(
            f"cannot use {LIBRARY}: {error}", "apt install libbpf1", ExitCode.UNSUPPORTED
        ) from error
    return loaded


def programs(object_pointer: int) -> Iterator[tuple[str, int]]:
    """Name and handle of every program of an open object."""
    lib = library()
    handle = None
    while handle := lib.bpf_object__next_program(object_pointer, handle):
        yield lib.bpf_program__name(handle).decode(), handle


def maps(object_pointer: int) -> Iterator[tuple[str, int]]:
    """Name and handle of every map of an open object."""
    lib = library()
    handle = None
    while handle := lib.bpf_object__next_map(object_pointer, handle):
        yield lib.bpf_map__name(handle).decode(), handle


class Messages:
    """Collects what libbpf prints while the context is open, instead of letting it print.

    A print callback gets a C ``va_list``, which ctypes cannot take apart, so the C library's own
    ``vsnprintf`` formats it.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._libc = ctypes.CDLL(None)
        self._libc.vsnprintf.argtypes = (_POINTER, ctypes.c_size_t, _TEXT, _POINTER)
        self._callback = _PRINT(self._take)
        self._before: Any = None

    def __enter__(self) -> Messages:
        self._before = library().libbpf_set_print(self._callback)
        return self

    def __exit__(self, *_: object) -> None:
        library().libbpf_set_print(_PRINT(self._before or 0))

    def _take(self, level: int, form: bytes, arguments: int) -> int:
        if level == 0:  # warnings; the rest is for debugging libbpf itself
            buffer = ctypes.create_string_buffer(_LONGEST_LOG)
            self._libc.vsnprintf(buffer, len(buffer), form, arguments)
            self.lines += buffer.value.decode("utf-8", "replace").splitlines()
        return 0
