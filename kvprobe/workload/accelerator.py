"""What the modelled accelerator does, told to a stand-in for the NVIDIA driver as it happens.

Without a GPU there is nothing that a driver could count. This log is the script of a stand-in
(``tests/gpu/nvml_standin.c``): so the sampler, the real ``pynvml`` and the join are tested against
a load whose truth is known.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from kvprobe.errors import KvprobeError

LINK_BYTES_PER_S = 8 << 30
"""Of the modelled copies to the accelerator: one at a time, as fast as this."""
PREFILL_SHARES = {"gpm1": 100, "gpm2": 91, "gpm5": 71, "gpm10": 37}
"""While a prefill runs, in percent: any work, SMs, tensor cores, memory bandwidth; else 0."""
_RECEIVED = "gpm21"
_MIB = 1 << 20


class AcceleratorLog:
    """Lines ``value 0 KEY SECONDS NUMBER``, each written at the change that it tells of.

    A line is one system call of a few microseconds; nothing is kept in memory.
    """

    def __init__(self, path: str | None) -> None:
        """Begin ``path`` anew; None tells nobody and copies nothing.

        Raises:
            KvprobeError: the file cannot be written.
        """
        self._link = threading.Lock()
        self._path = path
        self._file: int | None = None
        if path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise KvprobeError(
                f"cannot write {path}: {error.strerror}", "check the folder"
            ) from None
        self._epoch_ns = time.monotonic_ns()
        self._write(f"epoch {self._epoch_ns}\n")
        self._tell(dict.fromkeys((*PREFILL_SHARES, _RECEIVED), 0))

    def working(self, works: bool) -> None:
        """A prefill begins or ends; there is one at a time."""
        self._tell(PREFILL_SHARES if works else dict.fromkeys(PREFILL_SHARES, 0))

    def copy(self, size_bytes: int) -> None:
        """Wait for a copy of so many bytes, after those that others asked for before."""
        if self._file is None or not size_bytes:
            return
        with self._link:
            begin_ns = time.monotonic_ns()
            end_ns = begin_ns + size_bytes * 1_000_000_000 // LINK_BYTES_PER_S
            # Both ends at once: a sleep takes a little longer than it should, a copy does not.
            self._tell({_RECEIVED: LINK_BYTES_PER_S // _MIB}, begin_ns)
            self._tell({_RECEIVED: 0}, end_ns)
            while (left_ns := end_ns - time.monotonic_ns()) > 0:
                time.sleep(left_ns / 1e9)

    def close(self) -> None:
        """End the file; all is written already."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, values: Mapping[str, int], at_ns: int | None = None) -> None:
        if self._file is not None:
            at = ((at_ns or time.monotonic_ns()) - self._epoch_ns) / 1e9
            lines = (f"value 0 {key} {at:.9f} {value}\n" for key, value in values.items())
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            error.filename = self._path  # a write names no file by itself
            raise
