"""Request events in kvprobe's own JSON lines (docs/engine-events.md), put together."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import fields
from typing import Any

from kvprobe.adapter import SignalBatch
from kvprobe.arithmetic import ModelArithmetic
from kvprobe.clock import sample_clocks
from kvprobe.model import EngineFacts
from kvprobe.schema import REQUESTS, UNKNOWN
from kvprobe.signals.lines import LineFollower

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
_TOKENS = (
    "prompt_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "storage_hit_tokens",
    "computed_tokens",
)
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


class EventSignal:
    """The ``adapter.Signal`` of a JSON-lines event file.

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
        self._uncertainty_ns = 0
        self._understood = 0
        self._engine: EngineFacts | None = None
        self._rows: list[dict[str, Any]] = []
        self._keys: list[dict[str, Any]] = []

    def poll(self) -> SignalBatch:
        """Rows that are complete by now; at most some megabytes are read a call."""
        return self._batch(self._follower.lines())

    def end(self) -> SignalBatch:
        """As ``poll``: events tell their times themselves."""
        return self.poll()

    def close(self) -> SignalBatch:
        """The rest, requests that never finished included."""
        return self._batch(self._follower.close(), last=True)

    def _batch(self, lines: list[bytes], last: bool = False) -> SignalBatch:
        before = self._understood
        taken = sum(self._take(line) for line in lines if line.strip(b" \t\r"))
        ignored = sum(1 for line in lines if line.strip(b" \t\r")) - taken
        ignored += self._follower.take_skipped()
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
        self._offset_ns, self._uncertainty_ns = 0, 0
        if clock == "wall":
            _, self._offset_ns, self._uncertainty_ns = sample_clocks()
        facts = {
            key: event[key]
            for key, kind in _FACT_TYPES.items()
            if type(event.get(key)) is kind and (kind is not int or 0 < event[key] <= _MAX_COUNT)
        }
        self._engine = EngineFacts(**facts, arithmetic=_arithmetic(event.get("arithmetic")))
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
            row = {c.name: UNKNOWN for c in REQUESTS.columns} | {
                "id": request,
                "uncertainty_ns": self._uncertainty_ns,
            }
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


def _arithmetic(told: object) -> ModelArithmetic | None:
    """A model's arithmetic; None where a number is missing or is none: parts of it say nothing."""
    if not isinstance(told, dict):
        return None
    known = {f.name: told[f.name] for f in fields(ModelArithmetic) if told.get(f.name) is not None}
    source = known.pop("source", "")
    if not isinstance(source, str) or not all(
        type(value) is int and 0 < value <= _MAX_COUNT for value in known.values()
    ):
        return None
    try:
        return ModelArithmetic(**known, source=source)
    except TypeError:  # a number is missing
        return None


def _id(event: dict[str, Any]) -> str | None:
    request = event.get("id")
    if type(request) is int:
        request = str(request)
    return request if isinstance(request, str) and 0 < len(request) <= _MAX_ID_CHARS else None
