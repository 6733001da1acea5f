"""Read request events (docs/engine-events.md): follow a growing file, put the events together."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from typing import Any

from kvprobe.model import EngineFacts, SignalBatch
from kvprobe.schema import REQUESTS, UNKNOWN

MAX_LINE_BYTES = 4 << 20
"""Longer lines are skipped and counted; the keys of a million-token prompt are below it."""
_READ_BYTES = 1 << 20
_READ_BYTES_A_POLL = 8 << 20
_MAX_OPEN = 100_000
_MAX_CLOSED = 100_000
_LATE_EVENTS = 1000
_MAX_COUNT = 2**53
_MAX_ID_CHARS = 512

_TIMES = {
    "arrival": "arrival_ns",
    "scheduled": "scheduled_ns",
    "prefill_start": "prefill_start_ns",
    "prefill_end": "prefill_end_ns",
    "first_token": "first_token_ns",
    "finish": None,
}
_TOKENS = ("prompt_tokens", "device_hit_tokens", "storage_hit_tokens", "computed_tokens")
_FACT_TYPES: dict[str, type] = {
    "name": str,
    "model": str,
    "unit_tokens": int,
    "unit_bytes": int,
    "bytes_per_token": int,
    "reads_in_flight": int,
    "direct": bool,
    "root": str,
    "prefetch": bool,
    "prefill": str,
}


class LineFollower:
    """Complete lines of a file that grows, is rotated (replaced) or truncated, or comes later.

    A torn last line is kept until its end arrives. ``skipped`` counts lines over the limit.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._part = bytearray()
        self._skipping = False
        self._offset = 0
        self.skipped = 0

    def lines(self, most_bytes: int | None = _READ_BYTES_A_POLL) -> list[bytes]:
        """Lines that are complete by now, without their ends; reads at most ``most_bytes``."""
        found: list[bytes] = []
        while most_bytes is None or most_bytes > 0:
            if self._file is None and not self._open():
                break
            data = self._read()
            if data:
                self._split(data, found)
                if most_bytes is not None:
                    most_bytes -= len(data)
            elif not self._rotated():
                break
            else:
                self._finish_file(found)
        return found

    def close(self) -> list[bytes]:
        """The rest; a last line without an end counts as a line."""
        found = self.lines(None)
        self._finish_file(found)
        return found

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._offset = 0
        return True

    def _read(self) -> bytes:
        assert self._file is not None
        try:
            if os.fstat(self._file).st_size < self._offset:  # truncated: what we had is void
                self._offset = 0
                self._part.clear()
                self._skipping = False
            data = os.pread(self._file, _READ_BYTES, self._offset)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _rotated(self) -> bool:
        """Whether the path names another file by now."""
        assert self._file is not None
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        here = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _finish_file(self, found: list[bytes]) -> None:
        if self._part and not self._skipping:
            found.append(bytes(self._part))
        self._part.clear()
        self._skipping = False
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _split(self, data: bytes, found: list[bytes]) -> None:
        *ended, rest = data.split(b"\n")
        for line in ended:
            if self._skipping:
                self._skipping = False
            elif len(self._part) + len(line) > MAX_LINE_BYTES:
                self.skipped += 1
            else:
                found.append(bytes(self._part) + line if self._part else line)
            self._part.clear()
        if self._skipping:
            return
        self._part += rest
        if len(self._part) > MAX_LINE_BYTES:
            self._part.clear()
            self._skipping = True
            self.skipped += 1


class EventSignal:
    """The ``model.Signal`` of a JSON-lines event file.

    A request's row is handed out once: when it has finished and all its times are known, or when
    it has finished and late events are no longer waited for, or at the end.
    """

    def __init__(self, path: str) -> None:
        self._follower = LineFollower(path)
        self._open: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._seen: dict[str, set[str]] = {}
        self._finished_at: OrderedDict[str, int] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._with_keys: OrderedDict[str, None] = OrderedDict()
        self._offset_ns = 0
        self._understood = 0
        self._engine: EngineFacts | None = None
        self._rows: list[dict[str, Any]] = []
        self._keys: list[dict[str, Any]] = []

    def poll(self) -> SignalBatch:
        """Rows that are complete by now; at most some megabytes are read a call."""
        return self._batch(self._follower.lines())

    def close(self) -> SignalBatch:
        """The rest, requests that never finished included."""
        return self._batch(self._follower.close(), last=True)

    def _batch(self, lines: list[bytes], last: bool = False) -> SignalBatch:
        before = self._understood
        taken = sum(self._take(line) for line in lines if line.strip(b" \t\r"))
        ignored = sum(1 for line in lines if line.strip(b" \t\r")) - taken + self._follower.skipped
        self._follower.skipped = 0
        self._release(everything=last)
        batch = SignalBatch(
            self._rows, self._keys, self._engine, self._understood - before, ignored
        )
        self._rows, self._keys, self._engine = [], [], None
        return batch

    def _take(self, line: bytes) -> bool:
        """Use one line; False when there is nothing in it to use."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            return False
        if not isinstance(event, dict):
            return False
        name = event.get("event")
        if name == "engine":
            used = self._take_engine(event)
        elif name == "keys":
            used = self._take_keys(event)
        elif isinstance(name, str) and name in _TIMES:
            used = self._take_time(name, event)
        else:
            used = False
        self._understood += used
        return used

    def _take_engine(self, event: dict[str, Any]) -> bool:
        clock = event.get("clock", "monotonic")
        if clock not in ("monotonic", "wall") or not isinstance(event.get("name"), str):
            return False
        self._release(everything=True)  # a restarted engine may use its ids again
        self._closed.clear()
        self._with_keys.clear()
        self._offset_ns = wall_offset_ns() if clock == "wall" else 0
        facts = {
            key: event[key]
            for key, kind in _FACT_TYPES.items()
            if type(event.get(key)) is kind and (kind is not int or 0 < event[key] <= _MAX_COUNT)
        }
        self._engine = EngineFacts(**facts)
        return True

    def _take_keys(self, event: dict[str, Any]) -> bool:
        request, keys = _id(event), event.get("keys")
        if request is None or request in self._with_keys or not isinstance(keys, list):
            return False
        if not all(isinstance(key, str) for key in keys):
            return False
        self._remember(self._with_keys, request)
        self._keys += [
            {"request_id": request, "position": place, "key": key} for place, key in enumerate(keys)
        ]
        return True

    def _take_time(self, name: str, event: dict[str, Any]) -> bool:
        request, t_ns = _id(event), event.get("t_ns")
        if request is None or type(t_ns) is not int or not 0 < t_ns < 2**63:
            return False
        t_ns -= self._offset_ns
        if t_ns <= 0 or request in self._closed:
            return False
        seen = self._seen.setdefault(request, set())
        if name in seen:
            return False
        seen.add(name)
        row = self._open.get(request)
        if row is None:
            row = {c.name: UNKNOWN for c in REQUESTS.columns} | {"id": request}
            self._open[request] = row
        if (column := _TIMES[name]) is not None:
            row[column] = t_ns
        for token in _TOKENS:
            if type(count := event.get(token)) is int and 0 <= count <= _MAX_COUNT:
                row[token] = count
        if name == "finish":
            self._finished_at[request] = self._understood
        if request in self._finished_at and len(seen) == len(_TIMES):
            self._give(request)
        return True

    def _release(self, everything: bool) -> None:
        """Hand out what will not change any more."""
        if everything:
            for request in list(self._open):
                self._give(request)
            return
        late = self._understood - _LATE_EVENTS
        while self._finished_at and next(iter(self._finished_at.values())) < late:
            self._give(next(iter(self._finished_at)))
        while len(self._open) > _MAX_OPEN:
            self._give(next(iter(self._open)))

    def _give(self, request: str) -> None:
        self._rows.append(self._open.pop(request))
        self._finished_at.pop(request, None)
        self._seen.pop(request, None)
        self._remember(self._closed, request)

    @staticmethod
    def _remember(ids: OrderedDict[str, None], request: str) -> None:
        ids[request] = None
        if len(ids) > _MAX_CLOSED:
            ids.popitem(last=False)


def wall_offset_ns() -> int:
    """Wall clock minus monotonic clock, from the tightest of several bracketed readings."""
    best = (1 << 62, 0)
    for _ in range(9):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        best = min(best, (after - before, wall - (before + after) // 2))
    return best[1]


def _id(event: dict[str, Any]) -> str | None:
    request = event.get("id")
    if type(request) is int:
        request = str(request)
    return request if isinstance(request, str) and 0 < len(request) <= _MAX_ID_CHARS else None
