"""The threads that do an engine's storage work: one that looks up, some that load or store."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from kvprobe.workload.accelerator import AcceleratorLog
from kvprobe.workload.chunks import ChunkIO, Inventory, Place, is_stamped
from kvprobe.workload.journal import EventLog, TruthLog
from kvprobe.workload.prefill import Prefill
from kvprobe.workload.uring import Ring

Post = Callable[[str, Any], None]
"""Tell the scheduler: what happened, and to what."""


@dataclass
class Lookup:
    """Which leading chunks of a request are stored?"""

    request: str
    keys: list[str]
    every: bool
    hits: int = 0
    owner: Any = None


@dataclass
class Load:
    """Read these chunks; ``results``: bytes, a negative errno, or None where not tried."""

    request: str
    keys: list[str]
    results: list[int | None] = field(default_factory=list)
    corrupt: int = 0
    failed: bool = False
    tasks_left: int = 1
    owner: Any = None
    places: Any = None

    def __post_init__(self) -> None:
        self.results = [None] * len(self.keys)
        self.places = itertools.count()

    def finish(self, place: int, result: int, unit_bytes: int, buffer: memoryview) -> None:
        """Note how one read ended; what follows a chunk that could not be read is of no use."""
        self.results[place] = result
        self.failed |= result != unit_bytes
        self.corrupt += result > 0 and not is_stamped(self.keys[place], buffer)

    def good(self, unit_bytes: int) -> int:
        """Leading chunks that were read whole."""
        for place, result in enumerate(self.results):
            if result != unit_bytes:
                return place
        return len(self.results)


@dataclass
class Store:
    """Write these chunks."""

    request: str | None
    keys: list[str]


class Pool:
    """Threads that take jobs from one queue; a failure is posted, never lost."""

    def __init__(self, name: str, threads: int, place: Place, truth: TruthLog, post: Post) -> None:
        """Start ``threads`` threads."""
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._place, self._truth, self._post = place, truth, post
        self._stopping = False
        self.ios: list[ChunkIO] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Any) -> None:
        """Queue one job."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Drop queued jobs, wait for those being done."""
        self._stopping = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            io = ChunkIO(self._place, self._truth)
            self.ios.append(io)
            while (job := self._jobs.get()) is not None:
                if not self._stopping:
                    self._do(io, job)
        except Exception as error:
            self._post("failed", error)
        finally:
            self._end()

    def _do(self, io: ChunkIO, job: Any) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """What a thread does last."""


class LookupPool(Pool):
    """One thread: bursts of access(2), one burst a request."""

    def _do(self, io: ChunkIO, job: Lookup) -> None:
        going = True
        for key in job.keys:
            going = io.exists(key, job.request, "lookup") and going
            job.hits += going
            if not going and not job.every:
                break
        self._post("looked_up", job)


class LoadPool(Pool):
    """Loads: a job is one task that reads its files one after another, or N such tasks."""

    def __init__(self, inventory: Inventory, depth: int, *rest: Any) -> None:
        """``depth``: reads in flight a request."""
        self._inventory, self._depth = inventory, depth
        super().__init__(*rest)

    def submit(self, job: Load) -> None:
        """Queue as many tasks as the request may have reads in flight."""
        job.tasks_left = min(self._depth, len(job.keys))
        for _ in range(job.tasks_left):
            self._jobs.put(job)

    def _do(self, io: ChunkIO, job: Load) -> None:
        for place in job.places:
            if place >= len(job.keys) or job.failed or self._stopping:
                break
            key = job.keys[place]
            job.finish(place, io.load(key, job.request), self._place.unit_bytes, io.buffer)
            self._inventory.touch(key)
        with _tasks_lock:
            job.tasks_left -= 1
            done = job.tasks_left == 0
        if done:
            self._post("loaded", job)


_tasks_lock = threading.Lock()


class UringLoadPool(Pool):
    """Loads: a job is one task on one thread that keeps ``depth`` reads in an io_uring."""

    def __init__(self, inventory: Inventory, depth: int, *rest: Any) -> None:
        """``depth``: reads in flight a request."""
        self._inventory, self._depth = inventory, depth
        self._local = threading.local()
        super().__init__(*rest)

    def _do(self, io: ChunkIO, job: Load) -> None:
        if not hasattr(self._local, "ring"):
            self._local.ring = Ring(self._depth, self._place.unit_bytes)
        ring: Ring = self._local.ring
        waiting: dict[int, tuple[int, int, int]] = {}
        free = list(range(ring.depth))
        places = iter(range(len(job.keys)))
        going = True
        while going or waiting:
            while going and free:
                place = next(places, -1)
                going = place >= 0 and not job.failed and not self._stopping
                if not going:
                    break
                fd = io.open_for_read(job.keys[place], job.request)
                if fd < 0:
                    job.finish(place, fd, self._place.unit_bytes, io.buffer)
                    continue
                slot = free.pop()
                waiting[slot] = (place, fd, ring.prepare_read(fd, slot))
            for slot, result, end_ns in ring.submit_and_wait(1 if waiting else 0):
                place, fd, start_ns = waiting.pop(slot)
                os.close(fd)
                self._finish(io, job, place, result, start_ns, end_ns, ring.buffers[slot])
                free.append(slot)
        self._post("loaded", job)

    def _end(self) -> None:
        if hasattr(self._local, "ring"):
            self._local.ring.close()

    def _finish(
        self,
        io: ChunkIO,
        job: Load,
        place: int,
        result: int,
        start_ns: int,
        end_ns: int,
        buffer: memoryview,
    ) -> None:
        key = job.keys[place]
        io.log_read(key, job.request, result, start_ns, end_ns)
        job.finish(place, result, self._place.unit_bytes, buffer)
        self._inventory.touch(key)


class StorePool(Pool):
    """Stores: a job is the new chunks of one request, one after another."""

    def __init__(self, inventory: Inventory, *rest: Any) -> None:
        """``inventory`` says what to evict."""
        self._inventory = inventory
        super().__init__(*rest)

    def _do(self, io: ChunkIO, job: Store) -> None:
        stored = 0
        for key in job.keys:
            if self._stopping:
                break
            if not self._inventory.claim(key):
                continue
            stored += io.store(key, job.request)
            for gone in self._inventory.add(key):
                io.evict(gone)
        self._post("stored", stored)


@dataclass
class Computation:
    """Prefill what neither device memory nor storage gave."""

    request: str
    prompt_tokens: int
    device_tokens: int
    restored_tokens: int
    owner: Any = None

    @property
    def new(self) -> int:
        """Tokens to compute."""
        return self.prompt_tokens - self.device_tokens - self.restored_tokens


class PrefillThread:
    """The accelerator: it computes one prompt after another, in the order of submission."""

    def __init__(
        self, prefill: Prefill, events: EventLog, accelerator: AcceleratorLog, post: Post
    ) -> None:
        """Start the thread."""
        self._prefill, self._events, self._post = prefill, events, post
        self._accelerator = accelerator
        self._jobs: SimpleQueue[Computation | None] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def submit(self, job: Computation) -> None:
        """Queue one prompt."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Drop queued prompts, wait for the one being computed."""
        self._stopping = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if not self._stopping:
                    self._do(job)
        except Exception as error:
            self._post("failed", error)

    def _do(self, job: Computation) -> None:
        self._events.event(
            "prefill_start",
            job.request,
            device_hit_tokens=job.device_tokens,
            storage_hit_tokens=job.restored_tokens,
            computed_tokens=job.new,
        )
        self._accelerator.working(True)
        self._prefill.run(job.new, job.prompt_tokens - job.new)
        self._accelerator.working(False)
        self._events.event("prefill_end", job.request)
        self._post("prefilled", job)
