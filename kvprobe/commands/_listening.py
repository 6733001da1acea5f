"""Which engine is looked at and how it is heard: ``--engine``, ``--signal``, and what is found."""

from __future__ import annotations

import os
import stat
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvprobe.adapter import Engine, Process, RunningEngine, SignalPlace
from kvprobe.errors import KvprobeError
from kvprobe.model import EngineFacts
from kvprobe.signals.combined import CombinedSignal

AUTO, NONE, OWN = "auto", "none", "jsonl"
_EVENTS = "events"
_LOG_NAMES = (".log", ".out", ".err", ".txt")
_FILES = ("log", "files", "events")
_NOTHING_HEARD = {
    "log": "is it the engine's log, at the level that `kvprobe doctor` names?",
    "journal": "is it the engine's unit, at the level that `kvprobe doctor` names?",
    "files": "is it the folder that the engine writes to?",
    "otlp": "does the engine sample its requests' spans?",
}


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

    def tell(self) -> None:
        """Say on stderr what was found and opened."""
        for line in self.told:
            print(f"kvprobe: {line}", file=sys.stderr)

    def counts(self) -> Iterator[str]:
        """How much was heard where, a line each."""
        if self.signal is not None:
            for name, count in self.signal.understood.items():
                yield f"{name}: {count:,} messages understood"

    def close(self) -> None:
        """Stop listening, if whoever polls has not."""
        if self.signal is not None:
            self.signal.close()

    def notes(self) -> Iterator[str]:
        """What a reader must know of the signals, one sentence each."""
        signal = self.signal
        if signal is None:
            return
        yield from signal.notes
        for name, count in signal.understood.items():
            ignored, lost = signal.ignored[name], signal.lost[name]
            silent = not count and not any(name in note for note in signal.notes)
            if silent:
                why = _NOTHING_HEARD.get(name.partition(":")[0], "did the engine run?")
                yield f"nothing of a request was heard from {name}: {why}"
            if ignored and count:
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
        "known, with the signals of the engines that run here; none: look for no engine)",
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
    engine: str,
    signals: Sequence[str],
    root: str | None,
    pids: Sequence[int],
    detect: bool = True,
    command: Process | None = None,
) -> Listening:
    """Find the engine and open its signals.

    Args:
        engine: name of an adapter, ``auto``, or ``none``.
        signals: places as the user wrote them.
        root: only engines that keep files there, or tell of none.
        pids: only engines among these processes, their parents and descendants; empty: all.
        detect: whether to look for running engines.
        command: look at this process only; it is about to run.

    Raises:
        KvprobeError: an unknown engine, or a place that the user named and that cannot be opened.
    """
    from kvprobe import engines
    from kvprobe.signals import places

    known = engines.engines()
    if engine not in (AUTO, NONE) and engine not in known:
        raise KvprobeError(
            f"no engine named {engine!r}",
            f"known engines: {AUTO}, {NONE}, " + ", ".join(sorted(known)),
        )
    chosen = list(known.values()) if engine in (AUTO, NONE, OWN) else [known[engine]]
    named = [places.parse(text, _is_own_format(engine, text)) for text in signals]
    running: tuple[RunningEngine, ...] = ()
    told: list[str] = []
    if detect and engine not in (NONE, OWN):
        running, problems = _running(chosen, root, pids, command)
        told += [*map(_described, running), *problems]
    found = () if _EVENTS in {place.kind for place in named} else _places(running, named)
    signal = places.open_places(named, chosen)
    opened = [str(place) for place in named]
    for place in found:
        try:
            signal.add(places.open_feed(place, chosen))
            opened.append(str(place))
        except KvprobeError as error:
            told.append(f"not heard: {place}: {error.message}")
    if running and not opened:
        told.append("nothing is heard of requests: `kvprobe doctor` says what to add")
    elif running:
        told.append("listening to " + ", ".join(opened))
    facts = _facts(chosen, running, root)
    signal.know(facts)
    name = None if engine in (AUTO, NONE) else engine
    if name is None and {place.kind for place in named} == {_EVENTS}:
        name = OWN
    return Listening(name, signal if opened else None, facts, tuple(told))


def listen_for(options: Namespace, command: Process | None = None) -> Listening:
    """``listen`` as the command line says."""
    return listen(options.engine, options.signal, options.root, options.pid, command=command)


def _is_own_format(engine: str, text: str) -> bool:
    """Whether a bare file is in kvprobe's own format: unless the engine or its content deny it."""
    if engine not in (AUTO, NONE):
        return engine == OWN
    path = Path(text)
    try:
        with path.open("rb") as file:
            begin = file.read(1).strip()
    except OSError:
        begin = b""
    return begin in (b"", b"{") and path.suffix not in _LOG_NAMES


def about_to_run(pid: int, command: Sequence[str]) -> Process:
    """The process that ``command`` is going to be, with this one's environment and output."""
    log = None
    if stat.S_ISREG(os.fstat(2).st_mode):
        log = os.readlink("/proc/self/fd/2")
    name = os.path.basename(command[0])
    return Process(pid, os.getpid(), name, tuple(command), dict(os.environ), os.getcwd(), log)


def running_engines(table: Iterable[Process]) -> tuple[tuple[RunningEngine, ...], tuple[str, ...]]:
    """Engines among processes, their paths by the names they have here; and what went wrong."""
    from kvprobe import engines

    found, problems = engines.running(table)
    return tuple(map(_with_own_names, found)), problems


def _with_own_names(running: RunningEngine) -> RunningEngine:
    """Folders of a container are often mounted here too, and go by that name."""
    from kvprobe.sources.processes import own_name

    roots = tuple(map(own_name, running.roots))
    signals = tuple(
        replace(place, target=own_name(place.target)) if place.kind in _FILES else place
        for place in running.signals
    )
    facts = running.facts
    if facts is not None and facts.root is not None and roots:
        facts = replace(facts, root=roots[0])
    return replace(running, roots=roots, signals=signals, facts=facts)


def _running(
    chosen: Sequence[Engine], root: str | None, pids: Sequence[int], command: Process | None
) -> tuple[tuple[RunningEngine, ...], tuple[str, ...]]:
    from kvprobe.sources.processes import processes

    table = list(processes()) if command is None else [command]
    parents = {process.pid: process.parent for process in table}
    names = {engine.name for engine in chosen}
    found, problems = running_engines(table)
    running = [
        each
        for each in found
        if each.engine in names
        and (not pids or any(_related(each.pid, pid, parents) for pid in pids))
    ]
    return tuple(running if root is None else _of_root(running, root)), problems


def _of_root(running: Sequence[RunningEngine], root: str) -> Iterator[RunningEngine]:
    """Those that keep files there; of an engine of which none does, those that tell of no folder.

    Such a one may speak for another that keeps them, as vLLM does for LMCache.
    """
    keep = [each for each in running if any(_overlap(root, kept) for kept in each.roots)]
    names = {each.engine for each in keep}
    for each in running:
        if each in keep or (not each.roots and each.engine not in names):
            yield each


def _related(one: int, other: int, parents: dict[int, int]) -> bool:
    """Whether one process is the other, or above it."""
    return other in _line(one, parents) or one in _line(other, parents)


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    line = {pid}
    while (pid := parents.get(pid, 0)) > 1 and pid not in line:
        line.add(pid)
    return line


def _overlap(root: str, kept: str) -> bool:
    """Whether one folder is the other or above it; names of containers are not resolved."""
    one, other = Path(root).resolve(), Path(kept)
    if not kept.startswith("/proc/"):
        other = other.resolve()
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
    told = {
        name: _agreed([each.facts for each in running if each.engine == name and each.facts])
        for name in dict.fromkeys(each.engine for each in running)
    }
    stored = [engine.facts(root) for engine in chosen if root is not None and engine.facts]
    for facts in (*stored, *told.values()):
        if facts is not None:
            known = together_with(known, facts)
    return known


def _agreed(told: Sequence[EngineFacts]) -> EngineFacts | None:
    """What several servers of one engine have in common."""
    if not told:
        return None
    first, *others = told
    different: dict[str, Any] = {
        f.name: None
        for f in fields(first)
        if any(getattr(other, f.name) != getattr(first, f.name) for other in others)
    }
    return replace(first, **different)


def _described(running: RunningEngine) -> str:
    kept = f", KV cache in {', '.join(running.roots)}" if running.roots else ""
    return f"{running.engine} runs as process {running.pid}: {running.shape}{kept}"
