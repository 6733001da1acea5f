"""How a recording goes, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Protocol, TextIO

from kvprobe.capture.manifest import Manifest

_LINE_SECONDS = 5.0
_SECOND_NS = 1e9


class Progress(Protocol):
    """Told how it goes; ``close`` leaves the terminal as it was."""

    def recording(self, facts: Manifest) -> None:
        """About once a second while recording."""
        ...

    def packing(self, rows: int, total: int) -> None:
        """While the file is being made."""
        ...

    def close(self) -> None:
        """It is over."""
        ...


def progress_of(seconds: float | None, shared: bool = False) -> Progress:
    """A display on stderr.

    Args:
        seconds: how long the recording takes; None: until something else ends it.
        shared: whether another process writes to the same terminal, so that nothing may be drawn.
    """
    draw = sys.stderr.isatty() and not shared
    return Bar(seconds, sys.stderr) if draw else Lines(seconds, sys.stderr)


def status_line(facts: Manifest) -> str:
    """Rows per table, losses and the recorder's own CPU time in one line."""
    rows = "  ".join(f"{name} {loss.rows:,}" for name, loss in facts.losses.items() if loss.rows)
    lost = sum(loss.lost for loss in facts.losses.values())
    thinned = sum(loss.thinned for loss in facts.losses.values())
    parts = [rows or "no rows yet", f"lost {lost:,}"]
    if thinned:
        parts.append(f"thinned {thinned:,}")
    cpu_ns, wall_ns = facts.cost.agent_cpu_ns, facts.cost.wall_ns
    if cpu_ns is not None and wall_ns:
        parts.append(f"own CPU {100 * cpu_ns / wall_ns:.1f} % of a core")
    return "  ".join(parts)


class Lines:
    """A line every few seconds, for logs."""

    def __init__(self, seconds: float | None, stream: TextIO) -> None:
        self._of = "" if seconds is None else f" of {seconds:g}"
        self._stream = stream
        self._next = 0.0
        self._packing = False

    def recording(self, facts: Manifest) -> None:
        """Print where we are, unless that was printed just now."""
        elapsed = (facts.end_ns - facts.start_ns) / _SECOND_NS
        if elapsed >= self._next:
            self._next = elapsed + _LINE_SECONDS
            self._print(f"recording: {elapsed:.0f}{self._of} s  {status_line(facts)}")

    def packing(self, rows: int, total: int) -> None:
        """Print once that the file is being made."""
        if not self._packing:
            self._packing = True
            self._print(f"packing {total:,} rows")

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the recording
            print(f"kvprobe: {line}", file=self._stream, flush=True)


class Bar:
    """A bar that is drawn once a second: no thread of its own, nothing between two draws."""

    def __init__(self, seconds: float | None, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress: Any = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
        )
        self._seconds = seconds
        self._task = self._progress.add_task("recording", total=seconds, status="attached")
        self._progress.start()
        self._drawn_rows = 0

    def recording(self, facts: Manifest) -> None:
        """Draw the seconds and the rows so far."""
        elapsed = (facts.end_ns - facts.start_ns) / _SECOND_NS
        of = "" if self._seconds is None else f"/{self._seconds:g}"
        self._draw(
            description=f"recording {elapsed:.0f}{of} s",
            completed=elapsed,
            status=status_line(facts),
        )

    def packing(self, rows: int, total: int) -> None:
        """Draw the share that is in the file, at most a hundred times."""
        if rows < total and rows - self._drawn_rows < total / 100:
            return
        self._drawn_rows = rows
        self._draw(
            description="packing",
            total=total,
            completed=rows,
            status=f"{rows:,} of {total:,} rows",
        )

    def close(self) -> None:
        """Remove the bar."""
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _draw(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self._progress.update(self._task, **fields)
            self._progress.refresh()
