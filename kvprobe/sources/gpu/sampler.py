"""The GPU sampler: finds devices, samples them, survives their loss and their driver's."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvprobe.model import GpuCall, GpuFacts, GpuSampling, Rows
from kvprobe.sources.gpu import facts
from kvprobe.sources.gpu.device import Device
from kvprobe.sources.gpu.events import XidEvents
from kvprobe.sources.gpu.pool import Job, Pool
from kvprobe.sources.gpu.reasons import LIBRARY_NOT_FOUND, REASONS, Remedy, reason_of
from kvprobe.sources.gpu.rows import RowStore

INTERVAL_NS = 125_000_000
"""Devices refresh their counters each 100 ms: an interval that still has that when one is late."""
SECOND_NS = 1_000_000_000
_FIRST_PAUSE_NS = SECOND_NS
_LONGEST_PAUSE_NS = 30 * SECOND_NS
_DRAIN_NS = 5 * SECOND_NS
"""How long calls to a driver that is gone may take to come back before NVML is started anew."""
_CLOSE_S = 1.0
_LIBRARY = "libnvidia-ml.so.1"
NO_PACKAGE = "the Python package nvidia-ml-py is not installed"
NO_DEVICE = "the NVIDIA driver has no device"


def survey() -> GpuSampling:
    """Look once, in this thread: the devices, and what each of them does not answer."""
    nvml, why = _load()
    if nvml is None:
        return GpuSampling(why_none=why)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _none(error.value)
    try:
        found = []
        unreached: list[str] = []
        for handle, told in _reachable(nvml, unreached):
            rows = RowStore()
            device = Device(nvml, handle, told, rows, INTERVAL_NS, lambda *_: None)
            device.ask_all()
            found.append(device.described)
            device.free()
        return GpuSampling(
            tuple(found),
            facts.version(nvml, "Driver"),
            facts.version(nvml, "NVML"),
            None if found else "; ".join(unreached) or NO_DEVICE,
            expected=bool(unreached),
            notes=tuple(unreached),
        )
    except nvml.NVMLError as error:
        return _none(error.value)
    finally:
        _shut_down(nvml)


class GpuSampler:
    """Samples every NVIDIA device in threads of its own, from ``start`` to ``close``.

    Nothing here blocks its caller, and nothing that goes wrong with a driver is an error: it ends
    up as a reason in ``sampling``.

    Args:
        interval_ns: from one sample to the next, for what changes fast.
    """

    def __init__(self, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._rows = RowStore()
        self._pool = Pool()
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._open = False
        self._driver_lost = False
        self._lost_ns = 0
        self._pause_ns = _FIRST_PAUSE_NS
        self._look_ns = 0
        self._devices: dict[str, Device] = {}
        self._events: XidEvents | None = None
        self._past_jobs: list[Job] = []
        self._state = GpuSampling(why_none="the NVIDIA driver has not answered yet")
        self._notes: list[str] = []
        self._unreached: set[str] = set()
        self._places: set[int] = set()
        self._events_stale = False
        second_ns = max(1, SECOND_NS // interval_ns) * interval_ns
        self._watch = Job("watch", self._look, second_ns)
        self._xid = Job("Xid events", self._ask_events, second_ns)

    def start(self) -> None:
        """Begin; starting NVML, which can take seconds, is left to a thread."""
        self._began_ns = time.monotonic_ns()
        self._pool.add(self._watch)

    @property
    def sampling(self) -> GpuSampling:
        """Devices, costs and what happened, as of now."""
        with self._lock:
            state = self._state
            devices = tuple(d.described for d in self._devices.values())
            return GpuSampling(
                gpus=tuple(sorted(devices, key=lambda gpu: gpu.index)),
                driver=state.driver,
                nvml=state.nvml,
                why_none=None if devices else state.why_none,
                expected=state.expected,
                calls=tuple(_costs(self._all_jobs())),
                notes=tuple(self._notes),
            )

    def poll(self) -> Rows:
        """Rows of ``gpu`` since the last call."""
        return self._rows.take()

    def close(self) -> Rows:
        """Stop, and return the rest. A call that the driver does not end is left behind."""
        if self._pool.close(_CLOSE_S) and self._open:
            self._end_nvml()
            self._open = False
        return self._rows.take()

    # ------------------------------------------------------------ in the pool's threads

    def _look(self) -> bool:
        """Each second: start NVML, find what is lost, now and then what is new."""
        now = time.monotonic_ns()
        if self._driver_lost:
            self._end_lost(now)
        if not self._driver_lost and now >= self._look_ns:
            if not self._open:
                self._start_nvml(now)
            else:
                self._later(now)
                self._find_devices()
        if self._events_stale and not self._driver_lost:
            self._watch_events()
        return True

    def _start_nvml(self, now: int) -> None:
        self._nvml, why = _load() if self._nvml is None else (self._nvml, "")
        if self._nvml is None:
            with self._lock:
                self._state = GpuSampling(why_none=why)
            self._watch.dropped = True  # there will be none
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            with self._lock:
                self._state = _none(error.value)
            self._later(now)
            return
        self._open = True
        driver, nvml = facts.version(self._nvml, "Driver"), facts.version(self._nvml, "NVML")
        with self._lock:
            self._state = GpuSampling((), driver, nvml, NO_DEVICE, expected=False)
            if self._lost_ns:
                self._note(f"the NVIDIA driver is back after {_seconds(now - self._lost_ns)}")
                self._lost_ns = 0
        self._pause_ns = _FIRST_PAUSE_NS
        self._later(now)
        self._find_devices()

    def _later(self, now: int) -> None:
        self._look_ns = now + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS)

    def _find_devices(self) -> None:
        """Look at every place that holds no device known to be there, each in a call of its own.

        The first question about a device can take seconds: the driver starts it.
        """
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            if reason_of(error.value).remedy is Remedy.REOPEN:
                self._lose_driver(error.value)
            return
        for index in range(count):
            if index not in self._places:
                self._places.add(index)
                self._pool.add(self._first_question(index))

    def _first_question(self, index: int) -> Job:
        def run() -> bool:
            job.dropped = True
            try:
                self._identify(index)
            except self._nvml.NVMLError as error:
                self._not_reached(index, error.value)
                return False
            return True

        job = Job("first question", run, self._watch.interval_ns)
        with self._lock:
            self._past_jobs.append(job)
        return job

    def _identify(self, index: int) -> None:
        """Begin with a device, under the number it had before if it was there before."""
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        identity = facts.uuid_of(self._nvml, handle) or f"index {index}"
        known = self._devices.get(identity)
        if known is not None and known.present:
            return
        told = facts.facts_of(self._nvml, handle, index)
        with self._lock:
            if self._driver_lost:
                return
            numbers = {d.facts.index for d in self._devices.values()}
            if known is not None:
                told = replace(told, index=known.facts.index)
                self._past_jobs += known.jobs
                self._note(f"GPU {told.index} ({told.name}) is sampled again")
            elif index in numbers:
                told = replace(told, index=1 + max(numbers))
            device = Device(self._nvml, handle, told, self._rows, self._interval_ns, self._lose)
            self._devices[identity] = device
            self._events_stale = True
        if known is not None and not self._pool.in_flight() & set(known.jobs):
            known.free()
        for job in device.jobs:
            self._pool.add(job)

    def _not_reached(self, index: int, code: int) -> None:
        reason = reason_of(code)
        if reason.remedy is Remedy.REOPEN:
            self._lose_driver(code)
            return
        text = f"GPU {index} cannot be reached: {reason.why}"
        with self._lock:
            self._places.discard(index)
            if text not in self._unreached:
                self._unreached.add(text)
                self._note(text)
                if self._state.why_none == NO_DEVICE:  # there is one, and it does not answer
                    self._state = replace(self._state, why_none=text, expected=True)

    def _watch_events(self) -> None:
        """Have the Xid errors of all devices that are there."""
        self._events_stale = False
        if self._events is not None:
            self._events.free()
        present = [device for device in self._devices.values() if device.present]
        try:
            self._events = XidEvents(self._nvml, present, self._rows)
        except self._nvml.NVMLError:
            self._events = None
        if not self._xid.calls and self._events is not None:
            self._pool.add(self._xid)

    def _ask_events(self) -> bool:
        return self._events is None or self._events.ask()

    def _lose(self, device: Device, code: int) -> None:
        """A device does not answer any more, or no device does."""
        if reason_of(code).remedy is Remedy.REOPEN:
            self._lose_driver(code)
            return
        with self._lock:
            if not device.present:
                return
            device.leave()
            self._places.clear()  # the driver may number its devices anew
            self._pause_ns = _FIRST_PAUSE_NS
            self._look_ns = time.monotonic_ns() + self._pause_ns
            self._note(f"GPU {device.facts.index} was lost: {reason_of(code).why}")

    def _lose_driver(self, code: int) -> None:
        with self._lock:
            if self._driver_lost:
                return
            self._driver_lost = True
            self._lost_ns = time.monotonic_ns()
            self._state = _none(code)
            for device in self._devices.values():
                device.leave()
            self._note(f"the NVIDIA driver was lost: {reason_of(code).why}")

    def _end_lost(self, now: int) -> None:
        """Shut NVML down once no call is under way: it frees what such a call still uses."""
        if self._pool.in_flight() - {self._watch} and now - self._lost_ns < _DRAIN_NS:
            return
        if not self._pool.in_flight() - {self._watch}:
            self._end_nvml()
        self._events, self._open, self._driver_lost = None, False, False
        self._places.clear()
        self._look_ns = now

    def _end_nvml(self) -> None:
        if self._events is not None:
            self._events.free()
            self._events = None
        for device in self._devices.values():
            device.leave()
            device.free()
        _shut_down(self._nvml)

    def _all_jobs(self) -> list[Job]:
        present = [job for device in self._devices.values() for job in device.jobs]
        return [self._watch, self._xid, *present, *self._past_jobs]

    def _note(self, text: str) -> None:
        after = _seconds(time.monotonic_ns() - self._began_ns)
        if len(self._notes) < 100:
            self._notes.append(f"{after} after the start {text}")


def _load() -> tuple[Any, str]:
    """The module pynvml, or None and why. Without the driver's library it is not even imported."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return None, REASONS[LIBRARY_NOT_FOUND].why
    try:
        import pynvml
    except ImportError:
        return None, NO_PACKAGE
    return pynvml, ""


def _reachable(nvml: Any, unreached: list[str]) -> Iterable[tuple[Any, GpuFacts]]:
    """Each device that the driver can reach; ``unreached`` is told why others cannot be.

    Raises:
        pynvml.NVMLError: the driver is gone.
    """
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield handle, facts.facts_of(nvml, handle, index)
        except nvml.NVMLError as error:
            reason = reason_of(error.value)
            if reason.remedy is Remedy.REOPEN:
                raise
            fix = f"; {reason.fix}" if reason.fix else ""
            unreached.append(f"GPU {index} cannot be reached: {reason.why}{fix}")


def _none(code: int) -> GpuSampling:
    reason = reason_of(code)
    why = f"{reason.why}; {reason.fix}" if reason.fix else reason.why
    return GpuSampling(why_none=why, expected=True)


def _shut_down(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return


def _costs(jobs: Iterable[Job]) -> Iterable[GpuCall]:
    """The account of each question over all devices and all times it was asked."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name, []).append(job)
    for name, same in groups.items():
        if any(job.calls for job in same):
            yield GpuCall(
                name,
                sum(job.calls for job in same),
                sum(job.failed for job in same),
                sum(job.missed for job in same),
                sum(job.wall_ns for job in same),
                max(job.longest_ns for job in same),
                sum(job.cpu_ns for job in same),
                max(job.spacing_ns for job in same),
            )


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s"
