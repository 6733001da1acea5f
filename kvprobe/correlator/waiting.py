"""Which requests wait for storage at a time, and what the engine says each restored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvprobe.model import Frame

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NEVER = np.iinfo(np.int64).max


class Told(NamedTuple):
    """One waiting request: its place in order of arrival, until when it waits, what it restored.

    ``units`` files were restored (-1 unknown) and ``more`` held by device memory.
    """

    place: int
    deadline: int
    units: int
    more: int


def told_hits(requests: Frame) -> Ints:
    """Tokens that the engine says it had from storage; -1 unknown.

    Where it only adds them up with those of its host memory, the sum: no more than that.
    """
    storage, offload = requests["storage_hit_tokens"], requests["offload_hit_tokens"]
    return np.where(storage >= 0, storage, offload)


def doubt(requests: Frame) -> Ints:
    """How far the times of each request may be off, nanoseconds; 0 where nothing is said."""
    return np.maximum(requests["uncertainty_ns"], 0)


class Waiting:
    """Requests by arrival; one can ask from its arrival to its prefill (or first token).

    Requests of unknown arrival are left out. ``order`` are rows of ``requests``, ``units`` the
    files each restored (-1 unknown), ``more`` those that device memory held besides; both in that
    order and unknown where ``unit_tokens`` is. Uncertain times are taken at their widest.
    """

    def __init__(self, requests: Frame, unit_tokens: int | None) -> None:
        start, first_token = requests["prefill_start_ns"], requests["first_token_ns"]
        deadline = np.where(start >= 0, start, first_token)
        deadline = np.where(deadline >= 0, deadline + doubt(requests), _NEVER)
        # Doubt is mostly about the prefill: arrivals keep their order, and by it their bounds.
        order = np.argsort(requests["arrival_ns"], kind="stable")
        self.order = order[requests["arrival_ns"][order] >= 0]
        self.unit_tokens = unit_tokens
        earliest = (requests["arrival_ns"] - doubt(requests))[self.order]
        self.arrival = np.minimum.accumulate(earliest[::-1])[::-1]
        self.deadline = deadline[self.order]
        self.prompt = requests["prompt_tokens"][self.order]
        told, device = told_hits(requests)[self.order], requests["device_hit_tokens"][self.order]
        unit = unit_tokens or _NEVER
        most = np.where(told >= 0, np.maximum(told, 0) // unit, -1)
        self._most = most if unit_tokens else np.full(len(self.order), -1, np.int64)
        # Part of a sum may have been in host memory: storage need not have had it all.
        is_sum = (requests["storage_hit_tokens"][self.order] < 0) & (self._most > 0)
        self.units = np.where(is_sum, -1, self._most)
        self.more = np.maximum(device, 0) // unit
        self._longest = np.maximum.accumulate(self.deadline)
        known = self.deadline < _NEVER
        self._scale = max(int((self.deadline - self.arrival)[known].max(initial=1)), 1)

    def at(self, begin: int, end: int | None = None) -> Ints:
        """Places in ``order`` of the requests that waited at ``begin``, and on until ``end``."""
        end = begin if end is None else end
        stop = int(np.searchsorted(self.arrival, begin, side="right"))
        start = min(int(np.searchsorted(self._longest, end)), stop)
        return start + np.flatnonzero(self.deadline[start:stop] >= end)

    def told(self, time: int) -> list[Told]:
        """The requests that wait at ``time``."""
        near = self.at(time)
        columns = (near, self.deadline[near], self.units[near], self.more[near])
        return [Told(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def waited(self, places: Ints, at: int) -> Floats:
        """Time since arrival as a share of the longest wait."""
        return np.minimum((at - self.arrival[places]) / self._scale, 1.0)

    def off(self, places: Ints, found: int) -> Ints:
        """Files between ``found`` hits and what each was told; it may have tested device hits.

        0 where nothing was told; where only a sum was, it may not be exceeded.
        """
        told, most = self.units[places], self._most[places]
        short = np.where(told >= 0, told - found, 0)
        long = np.where(most >= 0, found - most - self.more[places], 0)
        off: Ints = np.maximum(np.maximum(short, long), 0)
        return off
