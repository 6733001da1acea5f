"""What the workload writes: engine events for kvprobe, and the truth for tests."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, TextIO

from kvprobe.errors import KvprobeError

_FLUSH_SECONDS = 0.2
_quoted = json.encoder.encode_basestring_ascii


class LineLog:
    """A JSON-lines file that any thread may add to and one thread flushes.

    Adding is one ``deque.append``; the costly encoding happens in ``flush``, so that the threads
    doing I/O are not held up.
    """

    def __init__(self, path: str | None) -> None:
        """Open ``path`` for writing; None keeps nothing.

        Raises:
            KvprobeError: the file cannot be created.
        """
        self._rows: deque[dict[str, Any] | tuple[Any, ...]] = deque()
        self._file: TextIO | None = None
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

    def flush(self) -> None:
        """Write what is queued by now."""
        if self._file is not None and self._rows:
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            self._file.write("".join(map(_encode, rows)))
            self._file.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


def _encode(row: dict[str, Any] | tuple[Any, ...]) -> str:
    """One line. Operations are formatted by hand: that is four times as fast."""
    if isinstance(row, dict):
        return json.dumps(row, separators=(",", ":")) + "\n"
    kind, phase, request, why, key, path, tid, requested, result, start_ns, end_ns, direct = row
    name = "null" if request is None else f'"{request}"'
    return (
        f'{{"kind":"{kind}","phase":"{phase}","id":{name},"why":"{why}","key":"{key}",'
        f'"path":{_quoted(path)},"tid":{tid},"offset":0,"requested":{requested},'
        f'"result":{result},"start_ns":{start_ns},"end_ns":{end_ns},'
        f'"direct":{"true" if direct else "false"}}}\n'
    )


class Flusher:
    """A thread that flushes logs several times a second; closes them at the end."""

    def __init__(self, *logs: LineLog) -> None:
        """Start the thread."""
        self._logs = logs
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, write what is left and close the logs."""
        self._ending.set()
        self._thread.join()
        for log in self._logs:
            log.close()

    def _run(self) -> None:
        while not self._ending.wait(_FLUSH_SECONDS):
            for log in self._logs:
                log.flush()


class TruthLog(LineLog):
    """Which request caused which operation: the reference of tests, never an input of kvprobe.

    The first line describes the run; each other line is one operation: ``kind`` (lookup, open,
    read, write, rename, unlink), ``phase`` (warm, run), ``id`` of the request or null, ``why``
    (lookup, load, store, evict), ``key``, ``path``, ``tid``, ``offset``, ``requested`` bytes,
    ``result`` (bytes, 0, a descriptor or a negative errno), ``start_ns`` and ``end_ns`` of the
    monotonic clock just outside the call, ``direct``.
    """

    def __init__(self, path: str | None, header: dict[str, Any]) -> None:
        """Open ``path`` and write the first line."""
        super().__init__(path)
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
        """Queue one operation."""
        if self._file is not None:
            self._rows.append(
                (
                    kind,
                    self.phase,
                    request,
                    why,
                    key,
                    path,
                    tid,
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
