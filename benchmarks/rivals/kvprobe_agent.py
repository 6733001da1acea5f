"""kvprobe itself as a tracer: a session, polled as a recording polls it.

Run as ``python -m benchmarks.rivals.kvprobe_agent LOADER DEVICE PROBE,...``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.rivals import Running, Tracer
from benchmarks.rivals.agent import Agent, serve
from kvprobe.bpf.session import Session, open_session
from kvprobe.model import Filters
from kvprobe.sources import POLL_SECONDS

_EVERYTHING = "block,ops,lookups"
_NOBODY = "nobody"
"""In place of a device: all devices, but only one process, which reads nothing."""


def tracers() -> tuple[Tracer, ...]:
    """What a capture runs, with either loader, and parts of it."""
    return (
        Tracer("kvprobe", "core loader: block, ops, lookups, as a capture", _start("core")),
        Tracer("kvprobe_block", "core loader: block only", _start("core", "block")),
        Tracer("kvprobe_bcc", "bcc loader: block, ops, lookups", _start("bcc")),
        Tracer("kvprobe_others", "core loader: all, for a process that reads nothing", _nobody),
    )


def _start(loader: str, probes: str = _EVERYTHING) -> Callable[[int, str], Running]:
    return partial(_agent, loader, probes)


def _agent(loader: str, probes: str, device: int, name: str) -> Running:
    return Agent(__name__, (loader, device, probes))


def _nobody(device: int, name: str) -> Running:
    return Agent(__name__, ("core", _NOBODY, _EVERYTHING))


class _Reader:
    """Takes rows as they come and does with them what the rival does with its: count and add up."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows: dict[str, int] = {}
        self._sum_ns = 0

    def work(self) -> float:
        for name, rows in self._session.poll().items():
            self._rows[name] = self._rows.get(name, 0) + len(rows)
            if name == "block":
                self._sum_ns += int((rows["done_ns"] - rows["queued_ns"]).sum())
        return POLL_SECONDS

    def finish(self) -> dict[str, Any]:
        time.sleep(POLL_SECONDS)
        self.work()
        losses = self._session.losses()
        return {
            "rows": self._rows.get("block", 0),
            "lost": losses["block"].lost,
            "more": {
                "ops_rows": self._rows.get("ops", 0),
                "ops_lost": losses["ops"].lost if "ops" in losses else 0,
                "thinned": losses["block"].thinned,
                "unmatched": self._session.counter("block_unmatched"),
                "programs": {c.name: (c.runs, c.run_ns) for c in self._session.cost() if c.runs},
            },
        }


def main() -> None:
    """The child."""
    loader, device, probes = sys.argv[1:]
    filters = Filters(tgids=(os.getpid(),)) if device == _NOBODY else Filters(device=int(device))
    with open_session(probes.split(","), filters, loader) as session:
        reader = _Reader(session)
        serve(reader.work, reader.finish)


if __name__ == "__main__":
    main()
