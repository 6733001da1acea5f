"""The engine's scheduler: requests arrive, are looked up, restored, prefilled and finished.

One thread decides; what other threads finish is acted upon at the next step, as in vLLM.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from kvprobe.workload.journal import EventLog
from kvprobe.workload.prompts import Prompt, chunk_key
from kvprobe.workload.threads import Computation, Load, Lookup, Pool, PrefillThread, Store

_TELL_NS = 200_000_000


@dataclass(frozen=True)
class Policy:
    """How the scheduler behaves. ``restore_from_tokens``: shorter stored prefixes are computed."""

    unit_tokens: int
    restore_from_tokens: int
    concurrency: int | None
    slots: int
    prefetch: bool
    step_ns: int
    device_cache_tokens: int
    lookup_every: bool
    emit_keys: bool
    store: bool


@dataclass
class Active:
    """A request on its way."""

    id: str
    prompt: Prompt
    keys: list[str]
    arrival_ns: int
    scheduled: bool = False
    ready: bool = False
    device_chunks: int = 0
    found_chunks: int = 0
    restored_chunks: int = 0
    reloads: bool = False


@dataclass
class Totals:
    """What the run did, for the summary."""

    requests: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    found_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    stored_chunks: int = 0
    evicted_reads: int = 0
    failed_reads: int = 0
    corrupt_reads: int = 0
    ttft_ns: list[int] = field(default_factory=list)


class DeviceCache:
    """Chunks in the accelerator's own memory, least recently used first."""

    def __init__(self, chunks: int) -> None:
        """Room for ``chunks`` chunks."""
        self._most = chunks
        self._keys: OrderedDict[str, None] = OrderedDict()

    def leading(self, keys: list[str]) -> int:
        """How many of the first ``keys`` are there."""
        for place, key in enumerate(keys):
            if key not in self._keys:
                return place
            self._keys.move_to_end(key)
        return len(keys)

    def add(self, keys: list[str]) -> None:
        """Keep these, forget the oldest."""
        for key in keys[: self._most]:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)


class Scheduler:
    """Runs prompts to their end; ``post`` is how other threads report."""

    def __init__(self, policy: Policy, unit_bytes: int, events: EventLog) -> None:
        """Prepare; pools are attached afterwards as they need ``post``."""
        self.totals = Totals()
        self._policy, self._unit_bytes, self._events = policy, unit_bytes, events
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._waiting: deque[Active] = deque()
        self._running = 0
        self._outstanding = 0
        self._stores = 0
        self._device = DeviceCache(policy.device_cache_tokens // policy.unit_tokens)
        self._told_ns = 0

    def post(self, what: str, about: Any) -> None:
        """Report from any thread."""
        self._inbox.put((what, about))

    def attach(
        self,
        lookups: Pool,
        loads: Pool,
        stores: Pool,
        prefill: PrefillThread,
        progress: Callable[[Totals], None],
    ) -> None:
        """Give the scheduler its threads."""
        self._lookups, self._loads, self._store_pool = lookups, loads, stores
        self._prefill, self._progress = prefill, progress

    def store_all(self, keys: list[str]) -> None:
        """The warm phase: store these chunks, none belonging to a request; wait for the end."""
        share = max(1, min(64, len(keys) // 8 or 1))
        jobs = [keys[at : at + share] for at in range(0, len(keys), share)]
        for job in jobs:
            self._store_pool.submit(Store(None, job))
        self._stores += len(jobs)
        while self._stores:
            self._handle(*self._inbox.get())
            self._tell()

    def run(self, prompts: Iterator[tuple[str, Prompt]]) -> None:
        """Serve all prompts; in an open loop (concurrency None) at their arrival times.

        Raises:
            OSError: a storage thread failed.
        """
        start_ns = time.monotonic_ns()
        upcoming = next(prompts, None)
        most = self._policy.concurrency
        while upcoming or self._outstanding or self._stores:
            while upcoming and self._may_arrive(upcoming[1], start_ns, most):
                self._arrive(*upcoming)
                upcoming = next(prompts, None)
            self._admit()
            due_ns = None
            if upcoming and most is None:
                due_ns = start_ns + upcoming[1].arrival_ns
            self._step(start_ns, due_ns)

    def _may_arrive(self, prompt: Prompt, start_ns: int, most: int | None) -> bool:
        if most is not None:
            return self._outstanding < most
        return time.monotonic_ns() - start_ns >= prompt.arrival_ns

    def _step(self, start_ns: int, due_ns: int | None) -> None:
        """Wait for a report or an arrival, then act on all reports at the next step boundary."""
        try:
            wait = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
            first = self._inbox.get(timeout=wait)
        except Empty:
            return
        step_ns = self._policy.step_ns
        if step_ns:
            left_ns = step_ns - (time.monotonic_ns() - start_ns) % step_ns
            time.sleep(left_ns / 1e9)
        self._handle(*first)
        while not self._inbox.empty():
            self._handle(*self._inbox.get())
        self._tell()

    def _tell(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._told_ns > _TELL_NS:
            self._told_ns = now_ns
            self._progress(self.totals)

    def _handle(self, what: str, about: Any) -> None:
        if what == "failed":
            raise about
        if what == "looked_up":
            self._looked_up(about)
        elif what == "loaded":
            self._loaded(about)
        elif what == "prefilled":
            self._prefilled(about)
        else:
            self._stores -= 1
            self.totals.stored_chunks += about

    def _arrive(self, request: str, prompt: Prompt) -> None:
        unit = self._policy.unit_tokens
        keys = [chunk_key(chunk, unit) for chunk in prompt.chunks(unit)]
        t_ns = self._events.event("arrival", request, prompt_tokens=prompt.tokens)
        if self._policy.emit_keys:
            self._events.keys(request, keys)
        active = Active(request, prompt, keys, t_ns)
        self._outstanding += 1
        self._waiting.append(active)
        if self._policy.prefetch:
            self._look_up(active)

    def _admit(self) -> None:
        while self._waiting and self._running < self._policy.slots:
            active = self._waiting.popleft()
            active.scheduled = True
            self._running += 1
            self._events.event("scheduled", active.id)
            if not self._policy.prefetch:
                self._look_up(active)
            elif active.ready:
                self._compute(active)

    def _look_up(self, active: Active) -> None:
        # At least one token is always computed: the last chunk of a prompt that ends with it
        # is not restored.
        usable = (active.prompt.tokens - 1) // self._policy.unit_tokens
        active.device_chunks = min(usable, self._device.leading(active.keys))
        keys = active.keys[active.device_chunks : usable]
        if keys:
            self._lookups.submit(Lookup(active.id, keys, self._policy.lookup_every, owner=active))
        else:
            self._set_ready(active)

    def _looked_up(self, lookup: Lookup) -> None:
        active: Active = lookup.owner
        active.found_chunks = lookup.hits
        tokens = lookup.hits * self._policy.unit_tokens
        if lookup.hits and tokens >= self._policy.restore_from_tokens:
            self._loads.submit(Load(active.id, lookup.keys[: lookup.hits], owner=active))
        else:
            self._set_ready(active)

    def _loaded(self, load: Load) -> None:
        active: Active = load.owner
        active.restored_chunks = load.good(self._unit_bytes)
        active.reloads = active.restored_chunks < len(load.keys)
        gone = load.results.count(-errno.ENOENT)
        self.totals.evicted_reads += gone
        bad = sum(result not in (None, self._unit_bytes) for result in load.results)
        self.totals.failed_reads += bad - gone
        self.totals.corrupt_reads += load.corrupt
        self._set_ready(active)

    def _set_ready(self, active: Active) -> None:
        active.ready = True
        if active.scheduled:
            self._compute(active)

    def _compute(self, active: Active) -> None:
        unit = self._policy.unit_tokens
        device, restored = active.device_chunks * unit, active.restored_chunks * unit
        self._prefill.submit(
            Computation(active.id, active.prompt.tokens, device, restored, owner=active)
        )

    def _prefilled(self, computation: Computation) -> None:
        active: Active = computation.owner
        unit, totals = self._policy.unit_tokens, self.totals
        device, restored = active.device_chunks * unit, active.restored_chunks * unit
        first_ns = self._events.event("first_token", active.id)
        self._events.event("finish", active.id)
        totals.requests += 1
        totals.prompt_tokens += active.prompt.tokens
        totals.device_tokens += device
        totals.found_tokens += active.found_chunks * unit
        totals.restored_tokens += restored
        totals.computed_tokens += computation.new
        totals.ttft_ns.append(first_ns - active.arrival_ns)
        self._device.add(active.keys)
        known = active.restored_chunks if active.reloads else active.found_chunks
        new = active.keys[active.device_chunks + known :]
        if self._policy.store and new:
            self._stores += 1
            self._store_pool.submit(Store(active.id, new))
        self._running -= 1
        self._outstanding -= 1
