"""What the screen is fed with: a document of the last seconds, as of now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvprobe.capture import FixedTables, Tables
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.window import Window
from kvprobe.errors import KvprobeError
from kvprobe.schema import TABLES
from kvprobe.sources import POLL_SECONDS, Source
from kvprobe.sources.replay import Recorded, ReplaySource

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_REFRESH_EVERY = round(1 / POLL_SECONDS)
"""Losses and cost are asked for in every so many polls: about once a second."""

Document = Mapping[str, Any]
Build = Callable[[Tables], Document]


@dataclass(frozen=True)
class Position:
    """How far a replay has come. ``speed`` is recorded seconds per second."""

    done_ns: int
    total_ns: int
    speed: float
    ended: bool


@dataclass(frozen=True)
class Snapshot:
    """All that the screen shows at one moment. ``now_ns`` is the source's CLOCK_MONOTONIC."""

    document: Document | None = None
    now_ns: int | None = None
    problems: tuple[str, ...] = ()
    position: Position | None = None


class Feed(Protocol):
    """Where snapshots come from. Only ``snapshot`` may take long: it is called in a thread."""

    def snapshot(self) -> Snapshot:
        """The state of now. Raises nothing that a source may be blamed for."""
        ...

    def pause(self, paused: bool) -> None:
        """Halt a replay or let it run; a live source goes on either way."""
        ...

    def change_speed(self, steps: int) -> None:
        """Make a replay faster (positive) or slower; nothing for a live source."""
        ...

    def restart(self) -> None:
        """Begin a replay anew; nothing for a live source."""
        ...

    def close(self) -> None:
        """Let go of the source."""
        ...


class LiveFeed:
    """Polls a source in a thread of its own; ``snapshot`` builds the document of its window.

    Args:
        source: what is polled; closed with the feed.
        manifest: the facts to begin the window with.
        seconds: length of the window.
        build: makes the document (``kvprobe.document.build``).
        notes: lines that stay on the screen, such as what could not be attached.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        seconds: float,
        build: Build,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._source = source
        self._window = Window(manifest, seconds)
        self._build = build
        self._notes = notes
        self._trouble: str | None = None
        self._began_ns = time.process_time_ns(), time.monotonic_ns()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="kvprobe-poll", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """The document of the window; what went wrong is a line in ``problems``."""
        problems = list(self._notes)
        with self._lock:
            window = self._window
            manifest = self._with_cost(window.manifest)
            tables = FixedTables(manifest, {name: window.frame(name) for name in TABLES})
            if self._trouble is not None:
                problems.append(self._trouble)
        document = None
        try:
            document = self._build(tables)
        except Exception as error:
            problems.append(f"this window cannot be read: {_one_line(error)}")
        return Snapshot(document, tables.manifest.end_ns, tuple(problems), self._position())

    def pause(self, paused: bool) -> None:
        """A live source goes on; only the screen stands still."""

    def change_speed(self, steps: int) -> None:
        """A live source has no speed."""

    def restart(self) -> None:
        """A live source cannot begin anew."""

    def close(self) -> None:
        """Stop polling and close the source."""
        self._stop.set()
        self._thread.join()
        self._source.close()

    def _position(self) -> Position | None:
        return None

    def _with_cost(self, manifest: Manifest) -> Manifest:
        """The facts with what this process has cost since it began to watch."""
        cpu_ns, wall_ns = time.process_time_ns(), time.monotonic_ns()
        cost = replace(
            manifest.cost,
            agent_cpu_ns=cpu_ns - self._began_ns[0],
            wall_ns=wall_ns - self._began_ns[1],
        )
        return replace(manifest, cost=cost)

    def _pump(self) -> None:
        polls = 0
        while not self._stop.wait(POLL_SECONDS):
            try:
                with self._lock:
                    batch = self._source.poll()
                    facts = self._source if polls % _REFRESH_EVERY == 0 else None
                    self._window.add(batch, facts)
            except Exception as error:
                # The screen keeps what it has; the operator reads why nothing new comes.
                self._trouble = f"the source stopped: {_one_line(error)}"
                return
            polls += 1


class ReplayFeed(LiveFeed):
    """Plays a capture; can be halted, sped up and begun anew.

    Args:
        recorded: the capture; stays open until the feed is closed.
        manifest: its facts.
        seconds: length of the window.
        build: makes the document.
        speed: recorded seconds per second at the start.
    """

    def __init__(
        self, recorded: Recorded, manifest: Manifest, seconds: float, build: Build, speed: float = 1
    ) -> None:
        self._recorded = recorded
        self._manifest = manifest
        self._seconds = seconds
        self._speed = speed
        self._paused = False
        self._replay = ReplaySource(recorded, speed)
        super().__init__(self._replay, manifest, seconds, build, manifest.notes)

    def pause(self, paused: bool) -> None:
        """Halt, or go on."""
        self._paused = paused
        self._set_speed()

    def change_speed(self, steps: int) -> None:
        """Go that many steps up or down the list of speeds."""
        nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self._speed))
        self._speed = SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + steps))]
        self._set_speed()

    def restart(self) -> None:
        """Begin at the start of the recording, with an empty window."""
        replay = ReplaySource(self._recorded, 0)
        with self._lock:
            self._replay = self._source = replay
            self._window = Window(self._manifest, self._seconds)
            self._set_speed()

    def _set_speed(self) -> None:
        self._replay.speed = 0.0 if self._paused else self._speed

    def _with_cost(self, manifest: Manifest) -> Manifest:
        return replace(manifest, cost=self._manifest.cost)

    def _position(self) -> Position:
        start, end = self._manifest.window_ns
        done = self._window.manifest.end_ns - start
        return Position(done, end - start, self._speed, ended=done >= end - start)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KvprobeError):
        return f"{text}; {error.hint}" if error.hint else text
    return f"{type(error).__name__}: {text}"
