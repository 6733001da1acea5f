"""Which engine is looked at and how it is heard: ``--engine``, ``--signal``, and what is found."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprobe.adapter import Engine, RunningEngine, SignalPlace
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.signals.combined import CombinedSignal

AUTO, OWN = "auto", "jsonl"
_EVENTS = "events"
_LOG_NAMES = (".log", ".out", ".err", ".txt")


@dataclass(frozen=True)
class Listening:
    """What was found and opened.

    ``engine_name``: the adapter whose files are looked for; None: those of all. ``told`` is one
    line for each engine and each place that could not be opened.
    """

    engine_name: str | None
    signal: CombinedSignal | None
    facts: EngineFacts | None = None
    told: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """What a reader must know of the signals, one sentence each."""
        signal = self.signal
        if signal is None:
            return
        for name, count in signal.understood.items():
            ignored, lost = signal.ignored[name], signal.lost[name]
            if not count:
                yield f"nothing was understood of {name}; requests may be unknown"
            if ignored:
                yield f"{ignored:,} messages of {name} were not understood, {count:,} were"
            if lost:
                yield f"{lost:,} messages of {name} were lost"
        if signal.late:
            yield f"{signal.late:,} messages came after their request was written down"


def add_engine_options(parser: ArgumentParser) -> None:
    """Add what says which engine is looked at, and how it is heard."""
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--engine",
        metavar="NAME",
        default=AUTO,
        help="whose files are KV cache and whose signals are read (default: auto, all that is "
        "known, with the signals of the engines that run here)",
    )
    group.add_argument(
        "--signal",
        metavar="KIND:TARGET",
        action="append",
        default=[],
        help="where the engine is heard: log:FILE, journal:UNIT, files:FOLDER, metrics:URL, "
        "otlp:PORT (kvprobe listens there), kv-events:ENDPOINT, events:FILE (kvprobe's own "
        "format); a bare FILE is one of these. May be given several times",
    )


def listen(
    engine: str, signals: Sequence[str], root: str | None, pids: Sequence[int], detect: bool = True
) -> Listening:
    """Find the engine and open its signals.

    Args:
        engine: name of an adapter, or ``auto``.
        signals: places as the user wrote them.
        root: only engines that keep files there, or tell of none.
        pids: only engines among these processes, their parents and descendants; empty: all.
        detect: whether to look for running engines.

    Raises:
        KvprobeError: an unknown engine, or a place that the user named and that cannot be opened.
    """
    from kvprobe import engines
    from kvprobe.signals import places

    known = engines.engines()
    if engine != AUTO and engine not in known:
        raise KvprobeError(
            f"no engine named {engine!r}", f"known engines: {AUTO}, " + ", ".join(sorted(known))
        )
    chosen = list(known.values()) if engine in (AUTO, OWN) else [known[engine]]
    named = [places.parse(text, _is_own_format(engine, text)) for text in signals]
    running = _running(chosen, root, pids) if detect and engine != OWN else ()
    found = () if _EVENTS in {place.kind for place in named} else _places(running, named)
    signal = places.open_places(named, chosen)
    told = [_described(each) for each in running]
    opened = [str(place) for place in named]
    for place in found:
        try:
            signal.add(places.open_feed(place, chosen))
            opened.append(str(place))
        except KvprobeError as error:
            told.append(f"not heard: {place}: {error.message}")
    if running and opened:
        told.append("listening to " + ", ".join(opened))
    facts = _facts(chosen, running, root)
    signal.know(facts)
    name = None if engine == AUTO else engine
    if engine == AUTO and {place.kind for place in named} == {_EVENTS}:
        name = OWN
    return Listening(name, signal if opened else None, facts, tuple(told))


def listen_for(options: Namespace, detect: bool = True) -> Listening:
    """``listen`` as the command line says; what was found is told on stderr."""
    found = listen(options.engine, options.signal, options.root, options.pid, detect)
    for line in found.told:
        print(f"kvprobe: {line}", file=sys.stderr)
    return found


def _is_own_format(engine: str, text: str) -> bool:
    """Whether a bare file is in kvprobe's own format: unless the engine or its content deny it."""
    if engine != AUTO:
        return engine == OWN
    path = Path(text)
    try:
        with path.open("rb") as file:
            begin = file.read(1).strip()
    except OSError:
        begin = b""
    return begin in (b"", b"{") and path.suffix not in _LOG_NAMES


def _running(
    chosen: Sequence[Engine], root: str | None, pids: Sequence[int]
) -> tuple[RunningEngine, ...]:
    from kvprobe import engines
    from kvprobe.sources.processes import processes

    table = list(processes())
    parents = {process.pid: process.parent for process in table}
    names = {engine.name for engine in chosen}
    found, _ = engines.running(table)
    return tuple(
        each
        for each in found
        if each.engine in names
        and (not pids or any(_related(each.pid, pid, parents) for pid in pids))
        and (root is None or not each.roots or any(_overlap(root, kept) for kept in each.roots))
    )


def _related(one: int, other: int, parents: dict[int, int]) -> bool:
    """Whether one process is the other, or above it."""
    return other in _line(one, parents) or one in _line(other, parents)


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    line = {pid}
    while (pid := parents.get(pid, 0)) > 1 and pid not in line:
        line.add(pid)
    return line


def _overlap(root: str, kept: str) -> bool:
    one, other = Path(root).resolve(), Path(kept).resolve()
    return one == other or one in other.parents or other in one.parents


def _places(
    running: Sequence[RunningEngine], named: Sequence[SignalPlace]
) -> tuple[SignalPlace, ...]:
    """Places of running engines; the user's word on a kind goes before."""
    kinds = {place.kind for place in named}
    places = dict.fromkeys(place for each in running for place in each.signals)
    return tuple(place for place in places if place.kind not in kinds)


def _facts(
    chosen: Sequence[Engine], running: Sequence[RunningEngine], root: str | None
) -> EngineFacts | None:
    from kvprobe.signals.combined import together_with

    known = None
    stored = [engine.facts(root) for engine in chosen if root is not None and engine.facts]
    for facts in (*stored, *(each.facts for each in running)):
        if facts is not None:
            known = together_with(known, facts)
    return known


def _described(running: RunningEngine) -> str:
    kept = f", KV cache in {', '.join(running.roots)}" if running.roots else ""
    return f"{running.engine} runs as process {running.pid}: {running.shape}{kept}"
