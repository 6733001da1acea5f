"""What the workload writes: engine events for kvprobe, and the truth for tests."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, TextIO

from kvprobe.errors import KvprobeError

TRUTH_COLUMNS = (
    "kind",
    "phase",
    "id",
    "why",
    "key",
    "path",
    "tid",
    "offset",
    "requested",
    "result",
    "start_ns",
    "end_ns",
    "direct",
)
"""Columns of a truth row. ``kind``: lookup (access), open, read, write, rename, unlink; ``why``:
lookup, load, store, evict; ``result``: bytes, 0, a descriptor or a negative errno."""

_SLICE = 500


class LineLog:
    """A JSON-lines file that any thread may add to and one thread flushes.

    Adding is one ``deque.append``; the costly encoding happens in ``flush``, in slices, so that
    the threads doing I/O are not held up for long.
    """

    def __init__(self, path: str | None) -> None:
        """Open ``path`` for writing; None keeps nothing.

        Raises:
            KvprobeError: the file cannot be created.
        """
        self._rows: deque[dict[str, Any] | tuple[Any, ...]] = deque()
        self._file: TextIO | None = None
        self._names: tuple[str, ...] = ()
        if path is not None:
            try:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in close()
            except OSError as error:
                raise KvprobeError(
                    f"cannot write {path}: {error.strerror}", "check the folder"
                ) from None

    def add(self, row: dict[str, Any]) -> None:
        """Queue one line."""
        if self._file is not None:
            self._rows.append(row)

    def flush(self, slices: int | None = None) -> None:
        """Write queued lines, at most ``slices`` slices of them; None writes all."""
        if self._file is None:
            return
        while self._rows and slices != 0:
            count = min(_SLICE, len(self._rows))
            lines = [self._encode(self._rows.popleft()) for _ in range(count)]
            self._file.write("\n".join(lines) + "\n")
            slices = None if slices is None else slices - 1
        self._file.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _encode(self, row: dict[str, Any] | tuple[Any, ...]) -> str:
        if isinstance(row, tuple):
            row = dict(zip(self._names, row, strict=True))
        return json.dumps(row, separators=(",", ":"))


class TruthLog(LineLog):
    """Which request caused which operation: the reference of tests, never an input of kvprobe."""

    def __init__(self, path: str | None, header: dict[str, Any]) -> None:
        """Open ``path`` and write one line about the run."""
        super().__init__(path)
        self._names = TRUTH_COLUMNS
        self.phase = "run"
        self.add({"kind": "workload", "pid": os.getpid(), **header})

    def operation(
        self,
        kind: str,
        why: str,
        request: str | None,
        key: str,
        path: str,
        tid: int,
        result: int,
        start_ns: int,
        end_ns: int,
        *,
        requested: int = 0,
        direct: bool = False,
    ) -> None:
        """Queue one operation; times are of the monotonic clock, just outside the call."""
        if self._file is None:
            return
        self._rows.append(
            (
                kind,
                self.phase,
                request,
                why,
                key,
                path,
                tid,
                0,
                requested,
                result,
                start_ns,
                end_ns,
                direct,
            )
        )


class EventLog(LineLog):
    """The request events of an engine, in the format of docs/engine-events.md."""

    def engine(self, **facts: Any) -> None:
        """The line that introduces the engine."""
        self.add({"event": "engine", "clock": "monotonic", **facts})

    def event(self, name: str, request: str, t_ns: int | None = None, **facts: Any) -> int:
        """One event of a request, now unless ``t_ns`` is given; returns its time."""
        t_ns = time.monotonic_ns() if t_ns is None else t_ns
        self.add({"event": name, "id": request, "t_ns": t_ns, **facts})
        return t_ns

    def keys(self, request: str, keys: Iterable[str]) -> None:
        """The chunk keys of a request."""
        self.add({"event": "keys", "id": request, "keys": list(keys)})


def read_truth(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the operations of a truth file; for tests."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return rows[0], rows[1:]
