"""How long work goes, on stderr: one line rewritten on a terminal, a line a phase elsewhere."""

from __future__ import annotations

import sys
import time

_REDRAW_SECONDS = 0.3


class PhaseLine:
    """Called with a phase and how much of it is done; a context that leaves a clean line."""

    def __init__(self) -> None:
        """Begin without a phase."""
        self._terminal = sys.stderr.isatty()
        self._phase = ""
        self._shown = 0.0

    def __enter__(self) -> PhaseLine:
        """Nothing is shown before the first phase."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the line away."""
        if self._terminal and self._phase:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show ``done`` of ``total``, not more often than an eye can follow."""
        now = time.monotonic()
        new = phase != self._phase
        if self._terminal and (new or now - self._shown > _REDRAW_SECONDS or done == total):
            print(f"\rkvprobe: {phase}: {done}/{total}\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = now
        elif not self._terminal and new:
            print(f"kvprobe: {phase}: {total}", file=sys.stderr, flush=True)
        self._phase = phase
