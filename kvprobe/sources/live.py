"""The running system as a source: BPF session, engine signal and host sampler in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvprobe.adapter import Signal, SignalBatch
from kvprobe.bpf.governor import Thinning
from kvprobe.model import (
    DeviceFacts,
    EngineFacts,
    GpuSampling,
    Loss,
    NvmePath,
    ProgramCost,
    Rows,
)
from kvprobe.sources import Batch, TableRows

SECOND_NS = 1_000_000_000


class Session(Protocol):
    """What a live source needs of ``kvprobe.bpf.session``."""

    def poll(self) -> Mapping[str, Rows]:
        """Records that arrived, per kernel table."""
        ...

    def aggregates(self) -> Mapping[str, Rows]:
        """Rows of ``depth`` and ``histogram`` for the time since the last call."""
        ...

    def losses(self) -> Mapping[str, Loss]:
        """How complete each kernel table is; still answers after ``close``."""
        ...

    def cost(self) -> tuple[ProgramCost, ...]:
        """What each program has cost in ``measured_ns``; still answers after ``close``."""
        ...

    @property
    def measured_ns(self) -> int:
        """For how long ``cost`` was measured."""
        ...

    @property
    def thinnings(self) -> Sequence[Thinning]:
        """What the governor did to stay inside its budget."""
        ...

    def close(self) -> None:
        """Detach and free."""
        ...


class Sampler(Protocol):
    """What a live source needs of ``kvprobe.sources.host``."""

    def sample(self) -> Sequence[Mapping[str, Any]]:
        """Rows of ``host`` as of now."""
        ...


class Watch(Protocol):
    """What a live source needs of ``kvprobe.sources.path_watch``."""

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Every whole disk seen so far."""
        ...

    @property
    def paths(self) -> tuple[NvmePath, ...]:
        """Every NVMe path seen so far."""
        ...

    def look(self, closely: bool = False) -> None:
        """Take in what is there now."""
        ...


class Gpus(Protocol):
    """What a live source needs of ``kvprobe.sources.gpu``."""

    @property
    def sampling(self) -> GpuSampling:
        """Devices, costs and what happened, as of now."""
        ...

    def poll(self) -> Rows:
        """Rows of ``gpu`` since the last call."""
        ...

    def close(self) -> Rows:
        """Stop, and return the rest."""
        ...


@dataclass
class LiveSource:
    """Satisfies ``kvprobe.sources.Source``.

    Kernel records and engine events are read at every ``poll``, aggregates, host counters, GPU
    samples and changes of disks and paths once a second. ``opening`` holds rows of tables that are
    read once; they come with the first ``poll``. ``clock`` gives CLOCK_MONOTONIC in nanoseconds.
    """

    session: Session
    signal: Signal | None = None
    sampler: Sampler | None = None
    watch: Watch | None = None
    gpus: Gpus | None = None
    opening: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    clock: Callable[[], int] = time.monotonic_ns
    engine: EngineFacts | None = None
    understood: int = 0
    ignored: int = 0
    finished: bool = field(default=False, init=False)
    _rows: dict[str, int] = field(default_factory=dict, init=False)
    _second_ns: int = field(default=0, init=False)

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Every whole disk seen so far."""
        return () if self.watch is None else self.watch.devices

    @property
    def nvme_paths(self) -> tuple[NvmePath, ...]:
        """Every NVMe path seen so far."""
        return () if self.watch is None else self.watch.paths

    @property
    def gpu(self) -> GpuSampling | None:
        """The NVIDIA devices, as far as their driver has told."""
        return None if self.gpus is None else self.gpus.sampling

    def poll(self) -> Batch:
        """Return what is new; never blocks."""
        now_ns = self.clock()
        tables: dict[str, TableRows] = {**self.opening, **self.session.poll()}
        self.opening = {}
        if self.signal is not None:
            self._take(tables, self.signal.poll())
        if now_ns - self._second_ns >= SECOND_NS:
            self._second_ns = now_ns
            self._each_second(tables)
        return self._batch(now_ns, tables)

    def losses(self) -> Mapping[str, Loss]:
        """How complete each table is; tables made here lose nothing."""
        made_here = {name: Loss(rows=count) for name, count in self._rows.items()}
        return {**made_here, **self.session.losses()}

    def cost(self) -> tuple[ProgramCost, ...]:
        """What the BPF programs have cost."""
        return self.session.cost()

    @property
    def measured_ns(self) -> int | None:
        """For how long ``cost`` was measured."""
        return self.session.measured_ns

    def notes(self) -> tuple[str, ...]:
        """What a reader must know of these rows, one sentence each."""
        made = self.session.thinnings
        if not made:
            return ()
        most = max(made, key=lambda thinning: thinning.keep_one_in)
        return (
            f"block rows were thinned, at most to one in {most.keep_one_in}, because {most.why}",
        )

    def close(self) -> Batch:
        """Detach and return the rest; ``losses`` and ``cost`` stay as they were at the end."""
        tables: dict[str, TableRows] = {}
        try:
            if self.signal is not None:  # first: what it has counted was also done by now
                self._take(tables, self.signal.end())
            now_ns = self.clock()
            tables.update(self.opening)
            tables.update(self.session.poll())
            self.opening = {}
            self._each_second(tables, last=True)
        finally:
            self.finished = True
            if self.gpus is not None:
                self.gpus.close()
            self.session.close()
        if self.signal is not None:
            self._take(tables, self.signal.close())
        return self._batch(now_ns, tables)

    def _each_second(self, tables: dict[str, TableRows], last: bool = False) -> None:
        tables.update(self.session.aggregates())
        if self.sampler is not None:
            tables["host"] = [*tables.get("host", ()), *self.sampler.sample()]
        if self.gpus is not None:
            tables["gpu"] = self.gpus.close() if last else self.gpus.poll()
        if self.watch is not None:
            self.watch.look(closely=last)

    def _take(self, tables: dict[str, TableRows], batch: SignalBatch) -> None:
        for name, rows in (
            ("requests", batch.requests),
            ("keys", batch.keys),
            ("host", batch.counters),
        ):
            tables[name] = [*tables.get(name, ()), *rows]
        self.engine = batch.engine or self.engine
        self.understood += batch.understood
        self.ignored += batch.ignored

    def _batch(self, now_ns: int, tables: dict[str, TableRows]) -> Batch:
        filled = {name: rows for name, rows in tables.items() if len(rows)}
        for name, rows in filled.items():
            self._rows[name] = self._rows.get(name, 0) + len(rows)
        return Batch(now_ns, filled)
