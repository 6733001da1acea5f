"""Periodic calls that may block, so that one that does delays no other.

One thread, the leader, waits for the next call that is due and makes it. A second, the standby,
wakes ``GRACE_NS`` later: where the leader is back, as nearly always, it sleeps on; where the
leader is stuck, it leads. So 24 quick calls that are due together cost two wake-ups, not 24
threads, and a call that takes 200 ms delays the others once, by ``GRACE_NS``. A call that is
known to be slow comes after the quick ones, and is handed over at once.

A driver serves one call at a time and may make the programs of its user wait meanwhile. So a call
that takes long is made less often: it may fill at most ``1 / SPACING`` of the time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

GRACE_NS = 4_000_000
SPACING = 10
MAX_SPACING_NS = 30_000_000_000
_TYPICAL_OF = 5


class Job:
    """One periodic call.

    Args:
        name: what it asks for, for the account of costs.
        run: makes the call; False: it failed and will be asked for less often while it fails.
        interval_ns: from one call to the next.
    """

    def __init__(self, name: str, run: Callable[[], bool], interval_ns: int) -> None:
        self.name = name
        self.run = run
        self.interval_ns = interval_ns
        self.calls = self.failed = self.missed = 0
        self.wall_ns = self.longest_ns = self.cpu_ns = 0
        self.dropped = False
        self._due_ns = 0
        self._failures = 0
        self._recent: deque[int] = deque(maxlen=_TYPICAL_OF)

    @property
    def typical_ns(self) -> int:
        """Median duration of the last calls: one slow call among many is no slow call."""
        return sorted(self._recent)[(len(self._recent) - 1) // 2] if self._recent else 0

    @property
    def spacing_ns(self) -> int:
        """The interval that is kept now, a multiple of ``interval_ns``."""
        wanted = self.typical_ns * SPACING
        if self._failures > 2:
            wanted = max(wanted, self.interval_ns << min(self._failures - 2, 20))
        periods = -(-min(wanted, MAX_SPACING_NS) // self.interval_ns)
        return self.interval_ns * max(1, periods)

    def begin(self, now_ns: int) -> None:
        """Be due now for the first time."""
        self._due_ns = now_ns

    def account(self, began_ns: int, ended_ns: int, cpu_ns: int, answered: bool) -> int:
        """Take in one call; returns when the next is due."""
        took = ended_ns - began_ns
        self.calls += 1
        self.wall_ns += took
        self.cpu_ns += cpu_ns
        self.longest_ns = max(self.longest_ns, took)
        if answered:
            self._recent.append(took)
        self.failed += not answered
        self._failures = 0 if answered else self._failures + 1
        spacing = self.spacing_ns
        # On a grid that all jobs share: what is due together costs one wake-up.
        self._due_ns = (self._due_ns // spacing + 1) * spacing
        if ended_ns >= self._due_ns:
            gone = (ended_ns - self._due_ns) // self.interval_ns + 1
            self.missed += gone
            self._due_ns += gone * self.interval_ns
        return self._due_ns


class Pool:
    """Runs jobs until it is closed.

    Args:
        clock: CLOCK_MONOTONIC in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[int, bool, int, Job]] = []
        self._order = itertools.count()
        self._running: set[Job] = set()
        self._leader: int | None = None
        self._idle = 0
        self._starting = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def add(self, job: Job) -> None:
        """Run a job from now on, first at once."""
        with self._changed:
            now = self._clock()
            job.begin(now)
            self._push(now, job)
            if not self._idle + self._starting:
                self._spawn()
            self._changed.notify_all()

    def drop(self, job: Job) -> None:
        """Run a job no more; a call that is under way ends as it may."""
        job.dropped = True

    def in_flight(self) -> frozenset[Job]:
        """The jobs that are being run at this moment."""
        with self._changed:
            return frozenset(self._running)

    def close(self, wait_s: float) -> bool:
        """Begin no more calls; returns whether all that were under way have ended in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + wait_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _push(self, due_ns: int, job: Job) -> None:
        heapq.heappush(self._due, (due_ns, job.typical_ns > GRACE_NS, next(self._order), job))

    def _spawn(self) -> None:
        """One thread more; the lock is held."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._work, name="kvprobe-gpu", daemon=True)
        self._threads.append(thread)
        self._starting += 1
        thread.start()

    def _work(self) -> None:
        job = self._take(None)
        while job is not None:
            began, cpu = self._clock(), time.thread_time_ns()
            answered = job.run()
            job = self._take((job, began, time.thread_time_ns() - cpu, answered))

    def _take(self, done: tuple[Job, int, int, bool] | None) -> Job | None:
        """Account for the call that was made; the next one to make, None: this thread may go."""
        me = threading.get_ident()
        with self._changed:
            if done is None:
                self._starting -= 1
            else:
                self._finish(*done)
            self._idle += 1
            try:
                while not self._closed:
                    leads = self._leader in (None, me)
                    wait_ns = self._wait_ns(leads)
                    if wait_ns is not None and wait_ns <= 0:
                        return self._pop()
                    if leads:
                        self._leader = me
                    elif self._idle > 2:
                        return None
                    self._changed.wait(None if wait_ns is None else wait_ns / 1e9)
                return None
            finally:
                self._idle -= 1
                if self._leader == me:
                    self._leader = None

    def _finish(self, job: Job, began_ns: int, cpu_ns: int, answered: bool) -> None:
        self._running.discard(job)
        due_ns = job.account(began_ns, self._clock(), cpu_ns, answered)
        if not job.dropped:
            first = self._due[0][0] if self._due else None
            self._push(due_ns, job)
            if first is None or due_ns < first:
                self._changed.notify_all()  # whoever waits, waits for a later call

    def _wait_ns(self, leads: bool) -> int | None:
        while self._due and self._due[0][3].dropped:
            heapq.heappop(self._due)
        if not self._due:
            return None
        return self._due[0][0] + (0 if leads else GRACE_NS) - self._clock()

    def _pop(self) -> Job:
        """The call that is due; sees to it that somebody can lead while it is made."""
        job = heapq.heappop(self._due)[3]
        self._running.add(job)
        if self._idle + self._starting < 2:  # this thread is one of them
            self._spawn()
        elif job.typical_ns > GRACE_NS:
            self._changed.notify_all()
        return job
