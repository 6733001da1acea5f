"""Engine adapters, one file each: which paths are KV cache, and how settings are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from kvprobe import registry
from kvprobe.adapter import Engine, KVPath, Process, RunningEngine, SignalPlace

_ODD_OPTIONS = (ValueError, LookupError, TypeError, AttributeError, OSError, ArithmeticError)
"""What an adapter may stumble over in options that nobody wrote for it."""


@lru_cache(maxsize=1)
def engines() -> dict[str, Engine]:
    """Every engine by name; a file in this folder that exports ``ENGINE`` is one."""
    return registry.load("kvprobe.engines", "ENGINE", Engine)


@lru_cache(maxsize=1 << 16)
def owner(path: str) -> tuple[str, KVPath] | None:
    """The name of the engine whose file ``path`` is, and its key; None for other files.

    An engine that only describes requests (``describes_files`` false) is not asked.
    """
    for name, engine in engines().items():
        if engine.describes_files and (found := engine.recognise(path)) is not None:
            return name, found
    return None


def recognise(path: str) -> KVPath | None:
    """The KV key of a path of any engine, or None. Cached: about a million paths a second."""
    found = owner(path)
    return found[1] if found else None


def running(processes: Iterable[Process]) -> tuple[tuple[RunningEngine, ...], tuple[str, ...]]:
    """The engines among processes, and a line for each whose options cannot be read.

    Of a process and its descendants the first counts: workers often keep its command line.
    Paths are as they can be opened from here.
    """
    found: dict[tuple[str, int], RunningEngine] = {}
    problems = []
    parents: dict[int, int] = {}
    for process in processes:
        parents[process.pid] = process.parent
        if _is_kvprobe(process.arguments):
            continue  # its command line may hold an engine's, behind --
        for name, engine in engines().items():
            try:
                seen = engine.detect(process) if engine.detect else None
            except _ODD_OPTIONS as error:
                problems.append(f"{name}: options of process {process.pid} are odd: {error}")
                continue
            if seen is not None:
                found[name, process.pid] = _from_here(seen, process.seen_from)
    first = (
        seen
        for (name, pid), seen in found.items()
        if not any((name, above) in found for above in _above(pid, parents))
    )
    return tuple(sorted(first, key=lambda seen: (seen.engine, seen.pid))), tuple(problems)


def _is_kvprobe(arguments: tuple[str, ...]) -> bool:
    programs = [word.rpartition("/")[2] for word in arguments[:2]]
    return "kvprobe" in programs or arguments[1:3] == ("-m", "kvprobe")


def _above(pid: int, parents: dict[int, int]) -> Iterable[int]:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def _from_here(seen: RunningEngine, prefix: str) -> RunningEngine:
    """The same with paths that can be opened from this mount namespace."""
    if not prefix:
        return seen
    return replace(
        seen,
        roots=tuple(prefix + root for root in seen.roots),
        signals=tuple(
            SignalPlace(place.kind, prefix + place.target)
            if place.kind in ("log", "files", "events")
            else place
            for place in seen.signals
        ),
    )
