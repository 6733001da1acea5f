"""One device while it is there: its jobs, and what it turned out not to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvprobe.model import GpuFacts, Missing
from kvprobe.schema import UNKNOWN
from kvprobe.sources.gpu import gpm, readings
from kvprobe.sources.gpu.pool import Job
from kvprobe.sources.gpu.reasons import Remedy, reason_of
from kvprobe.sources.gpu.rows import RowStore

Lost = Callable[["Device", int], None]
"""Told of an error after which the device, or the whole driver, is to be looked for again."""


class Device:
    """A device, its handle and its jobs.

    Args:
        nvml: the module pynvml.
        handle: of the device, good until NVML is shut down.
        facts: what is known of it.
        rows: where rows go.
        interval_ns: from one sample to the next, for what changes fast.
        lost: told when the device or the driver is gone.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        facts: GpuFacts,
        rows: RowStore,
        interval_ns: int,
        lost: Lost,
    ) -> None:
        self.facts = facts
        self.handle = handle
        self.jobs: list[Job] = []
        self.present = True
        self._nvml = nvml
        self._rows = rows
        self._interval_ns = interval_ns
        self._lost = lost
        self._gpm: list[gpm.GpmReader] = []
        self._refused: dict[str, Missing] = {}
        self._make_jobs()

    @property
    def described(self) -> GpuFacts:
        """The facts with what it did not answer, as far as it was asked."""
        gaps = dict(self._refused)
        for reader in self._gpm:
            for column in reader.unsupported:
                gaps[column] = Missing(column, "this device does not support it", "")
        return replace(self.facts, not_sampled=tuple(gaps.values()))

    def ask_all(self) -> None:
        """Make every call once, in this thread."""
        for job in self.jobs:
            job.run()

    def leave(self) -> None:
        """Make no more calls."""
        self.present = False
        for job in self.jobs:
            job.dropped = True

    def free(self) -> None:
        """Give back what NVML allocated; no call may be under way."""
        for reader in self._gpm:
            reader.free()
        self._gpm = []

    def _make_jobs(self) -> None:
        asked = readings.ALWAYS if self.facts.gpm else readings.ALWAYS + readings.WITHOUT_GPM
        for reading in asked:
            ask = readings.reader(reading, self._nvml, self.handle, self.facts.index, self._rows)
            self._add(reading.name, ask, reading.interval_ns, reading.without)
        if not self.facts.gpm:
            self._refused["GPM"] = Missing(
                "GPM",
                "the device or its driver has no GPM (it takes Hopper or later)",
                "no memory bandwidth, no activity of SMs and tensor cores: NVML's utilisation is "
                "busy time and cannot be turned into bytes",
            )
            return
        least_ns = min(gpm.LEAST_SPAN_NS, self._interval_ns * 4 // 5)
        for instance in (UNKNOWN, *self.facts.instances):
            subject = (self.facts.index, instance)
            name = "GPM" if instance == UNKNOWN else f"GPM of MIG instance {instance}"
            try:
                reader = gpm.GpmReader(self._nvml, self.handle, subject, self._rows, least_ns)
            except self._nvml.NVMLError as error:
                self._refuse(name, error.value, "bandwidth and activity")
                continue
            self._gpm.append(reader)
            self._add(name, reader.ask, None, "bandwidth and activity")

    def _add(
        self, name: str, ask: Callable[[], None], interval_ns: int | None, without: str
    ) -> None:
        """A job that asks and knows what to do with every error."""

        def run() -> bool:
            try:
                ask()
            except self._nvml.NVMLError as error:
                if not job.dropped:
                    self._failed(job, error.value, without)
                return False
            return True

        periods = max(1, (interval_ns or 0) // self._interval_ns)
        job = Job(name, run, periods * self._interval_ns)
        self.jobs.append(job)

    def _failed(self, job: Job, code: int, without: str) -> None:
        remedy = reason_of(code).remedy
        if remedy in (Remedy.FIND_GPU, Remedy.REOPEN):
            self._lost(self, code)
        elif remedy is Remedy.DROP:
            job.dropped = True
            self._refuse(job.name, code, without)

    def _refuse(self, name: str, code: int, without: str) -> None:
        reason = reason_of(code)
        self._refused[name] = Missing(name, reason.why, without, reason.fix)
