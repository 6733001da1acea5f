"""Follow each thread's reads: a run of them that goes on through one promise belongs to it.

Two steps. First each thread's reads are cut into runs that some promise explains as a whole, in
its order. Then each run is given to one of the promises that explain it, the clear ones first: a
key (or a piece of its file) is read once for a promise, and a job is read to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.bursts import Promise
from kvprobe.correlator.identify import KVFiles
from kvprobe.correlator.waiting import doubt
from kvprobe.model import Frame
from kvprobe.schema import OpKind

Ints = NDArray[np.int64]
Piece = tuple[int, int]
"""A key and an offset in its file."""

MISSED_SHARE = 0.1
"""Share of a run's reads, beyond one, that a promise may miss."""
_TOGETHER = (OpKind.URING_READ, OpKind.CUFILE_READ_DONE)
"""By these one thread has pieces of several files in flight together."""


@dataclass
class _Run:
    """One thread's reads so far and each promise that explains them -> place reached in it.

    Where lookups were lost (``lossy``) a promise may miss some of the reads (``missed``).
    ``unexplained`` are reads since the last that no promise knows.
    """

    ops: list[int]
    pieces: dict[Piece, None]
    candidates: dict[int, int]
    lossy: bool
    missed: Counter[int] = field(default_factory=Counter)
    unexplained: list[int] = field(default_factory=list)

    def goes_on(self, op: int, piece: Piece, fits: dict[int, int], back: int) -> bool:
        """Take a read that comes after the last: a later key, or another piece of its file.

        Args:
            op: row of ``ops``.
            piece: what it reads.
            fits: promises of that key -> place in them.
            back: how many places it may lie behind the furthest.
        """
        if piece in self.pieces:
            return False
        if not fits:
            self.unexplained.append(op)
            return True
        onward = {
            p: max(fits[p], place)
            for p, place in self.candidates.items()
            if p in fits and fits[p] >= place - back
        }
        if not onward:
            return False
        self.missed.update(p for p in self.candidates if p not in onward)
        most = 1 + MISSED_SHARE * len(self.ops) if self.lossy else 0
        self.candidates = {
            p: place for p, place in self.candidates.items() if self.missed[p] <= most
        } | onward
        # Between two reads of one job is no other.
        self.ops += [*self.unexplained, op]
        self.unexplained.clear()
        self.pieces[piece] = None
        return True


def follow(
    reads: Ints,
    promises: Sequence[Promise],
    requests: Frame,
    ops: Frame,
    files: KVFiles,
    fan_out: int,
    lossy: bool,
) -> Iterator[tuple[Promise, list[int]]]:
    """Runs of reads with the promise that each belongs to.

    Args:
        reads: rows of ``ops`` to follow.
        promises: promises that have a request.
        requests: frame of the ``requests`` table.
        ops: frame of the ``ops`` table.
        files: KV keys of the operations.
        fan_out: threads that may read for one request at once.
        lossy: whether some lookups were lost.
    """
    reads = reads[np.argsort(ops["start_ns"][reads], kind="stable")]
    deadlines = _Deadlines(requests)
    runs = _cut(reads, _Open(promises, deadlines), ops, files, fan_out, lossy)
    choice = _Choice(promises, deadlines, ops, fan_out)
    for run in sorted(runs, key=lambda run: (len(run.candidates), ops["start_ns"][run.ops[0]])):
        yield promises[choice.of(run)], run.ops


class _Deadlines:
    """Until when a request can restore: start of prefill and first token; unknown is never."""

    def __init__(self, requests: Frame) -> None:
        start, first_token = requests["prefill_start_ns"], requests["first_token_ns"]
        late = doubt(requests)
        self.first_token = np.where(first_token >= 0, first_token + late, np.iinfo(np.int64).max)
        self.prefill = np.where(start >= 0, start + late, self.first_token)


class _Open:
    """Promises by key, as time goes on: those that have begun and whose request still waits."""

    def __init__(self, promises: Sequence[Promise], deadlines: _Deadlines) -> None:
        self._begin = [p.start_ns for p in promises]
        self._prefill = [int(deadlines.prefill[p.request]) for p in promises]
        self._end = [int(deadlines.first_token[p.request]) for p in promises]
        self._ahead: dict[int, list[tuple[int, int]]] = {}
        self._now: dict[int, list[tuple[int, int]]] = {}
        for p in sorted(range(len(promises)), key=lambda p: -promises[p].start_ns):
            for place, key in enumerate(promises[p].hits):
                self._ahead.setdefault(key, []).append((p, place))

    def at(self, key: int, time: int) -> dict[int, int]:
        """Promise -> place of the key in it; ``time`` must not go back from call to call.

        Requests whose prefill has begun restore no more, unless they alone are left: then the
        restore overlaps the prefill.
        """
        ahead, now = self._ahead.get(key, []), self._now.setdefault(key, [])
        while ahead and self._begin[ahead[-1][0]] <= time:
            now.append(ahead.pop())
        now[:] = [(p, place) for p, place in now if self._end[p] >= time]
        return dict([(p, place) for p, place in now if self._prefill[p] >= time] or now)


def _cut(
    reads: Ints, still_open: _Open, ops: Frame, files: KVFiles, fan_out: int, lossy: bool
) -> list[_Run]:
    runs: list[_Run] = []
    running: dict[int, _Run] = {}
    columns = (ops["tid"], files.op_key, ops["offset"], ops["start_ns"], ops["kind"])
    rows = zip(reads.tolist(), *(column[reads].tolist() for column in columns), strict=True)
    for op, tid, key, offset, start, kind in rows:
        piece = (key, offset)
        fits = still_open.at(key, start)
        back = fan_out - 1 if kind in _TOGETHER else 0
        run = running.get(tid)
        if (run is None or not run.goes_on(op, piece, fits, back)) and fits:
            running[tid] = _Run([op], {piece: None}, fits, lossy)
            runs.append(running[tid])
    return runs


class _Choice:
    """Gives runs to promises, one after another."""

    def __init__(
        self, promises: Sequence[Promise], deadlines: _Deadlines, ops: Frame, fan_out: int
    ) -> None:
        self._promises, self._ops, self._fan_out = promises, ops, fan_out
        self._prefill = deadlines.prefill
        self._kept: set[tuple[int, int, int]] = set()

    def of(self, run: _Run) -> int:
        """Number of the promise that keeps this run."""
        chosen = min(run.candidates, key=lambda p: self._cost(run, p))
        self._kept.update((chosen, *piece) for piece in run.pieces)
        return chosen

    def _cost(self, run: _Run, p: int) -> tuple[int, int, int, int]:
        """Fewest kept by others or missed, fewest after prefill, complete, then the oldest."""
        promise = self._promises[p]
        taken = sum((p, *piece) in self._kept for piece in run.pieces) + run.missed[p]
        late = int((self._ops["end_ns"][run.ops] > self._prefill[promise.request]).sum())
        end = len(promise.hits) if promise.restored is None else promise.restored
        left_over = abs(end - run.candidates[p] - 1)
        # One of several threads on the same job stops up to that many keys before the end.
        share = 1 if self._ops["kind"][run.ops[0]] in _TOGETHER else self._fan_out
        return taken, late, left_over // share, promise.start_ns
