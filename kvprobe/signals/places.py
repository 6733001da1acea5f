"""From the words of the command line to open signals: ``log:/var/log/vllm.log``, ``otlp:4317`` ..

Which adapter reads a message is decided message by message: each place is given all that the
chosen engines know to read, since one log often has the lines of two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvprobe.adapter import Engine, Signal, SignalPlace
from kvprobe.errors import KvprobeError
from kvprobe.signals import Feed
from kvprobe.signals.combined import CombinedSignal

EVENTS = "events"


def parse(text: str, own_format: bool) -> SignalPlace:
    """A place as written on the command line; a bare path is a file or a folder.

    Args:
        text: ``KIND:TARGET`` or a path.
        own_format: whether a bare file holds events in kvprobe's own format.

    Raises:
        KvprobeError: the kind is unknown, or the target is empty.
    """
    kind, colon, target = text.partition(":")
    if colon and "/" not in kind:
        if kind not in (EVENTS, *_OPENERS):
            raise KvprobeError(
                f"no signal of kind {kind!r}",
                "KIND:TARGET with one of " + ", ".join([EVENTS, *_OPENERS]) + "; or a file",
            )
        if not target:
            raise KvprobeError(f"{text} names no target", f"such as {kind}:{_EXAMPLES[kind]}")
        return SignalPlace(kind, target)
    if Path(text).is_dir():
        return SignalPlace("files", text)
    return SignalPlace(EVENTS if own_format else "log", text)


def open_places(places: Sequence[SignalPlace], engines: Sequence[Engine]) -> CombinedSignal:
    """Open every place; what one opened is closed again where another cannot be.

    Raises:
        KvprobeError: a place cannot be opened, and why.
    """
    places = list(dict.fromkeys(places))
    signal = CombinedSignal([], [_events(p.target) for p in places if p.kind == EVENTS])
    try:
        for place in places:
            if place.kind != EVENTS:
                signal.add(open_feed(place, engines))
    except BaseException:
        signal.close()
        raise
    return signal


def open_feed(place: SignalPlace, engines: Sequence[Engine]) -> Feed:
    """Open one place of any kind but ``events``.

    Raises:
        KvprobeError: it cannot be opened, and why; or none of the engines says anything there.
    """
    if not any(place.kind in kinds_of(engine) for engine in engines):
        names = ", ".join(engine.name for engine in engines)
        kinds = dict.fromkeys(kind for engine in engines for kind in kinds_of(engine))
        raise KvprobeError(
            f"kvprobe reads no signal {place.kind} of {names}",
            "those it reads: " + ", ".join([EVENTS, *kinds]),
        )
    return _OPENERS[place.kind](place.target, engines)


def kinds_of(engine: Engine) -> tuple[str, ...]:
    """The kinds of places where this engine can be heard."""
    said = {
        "log": engine.log_lines,
        "journal": engine.log_lines,
        "files": engine.json_files,
        "metrics": engine.metrics,
        "otlp": engine.read_span,
        "kv-events": engine.publishes_kv_events,
    }
    return tuple(kind for kind, what in said.items() if what)


def _events(path: str) -> Signal:
    from kvprobe.signals.events import EventSignal

    return EventSignal(_file(path))


def _log(path: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.log import LogFeed

    return LogFeed(_file(path), [line for engine in engines for line in engine.log_lines])


def _journal(unit: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.journal import JournalFeed

    return JournalFeed(unit, [line for engine in engines for line in engine.log_lines])


def _files(folder: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.files import FilesFeed

    return FilesFeed(folder, [files for engine in engines for files in engine.json_files])


def _metrics(url: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.metrics import MetricsFeed

    return MetricsFeed(url, [e.metrics for e in engines if e.metrics is not None])


def _otlp(address: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.otlp import OtlpFeed

    return OtlpFeed(address, [e.read_span for e in engines if e.read_span is not None])


def _kv_events(endpoint: str, engines: Sequence[Engine]) -> Feed:
    from kvprobe.signals.kv_events import KVEventsFeed

    return KVEventsFeed(endpoint)


def _file(path: str) -> str:
    """The path, if a file of that name is there or may come."""
    if Path(path).is_dir():
        raise KvprobeError(f"{path} is a folder", "name the file in it that the engine writes")
    if not Path(path).resolve().parent.is_dir():
        raise KvprobeError(f"no file {path} for the signal", "name the file the engine writes")
    return path


_OPENERS: dict[str, Callable[[str, Sequence[Engine]], Feed]] = {
    "log": _log,
    "journal": _journal,
    "files": _files,
    "metrics": _metrics,
    "otlp": _otlp,
    "kv-events": _kv_events,
}
_EXAMPLES = {
    EVENTS: "/var/log/engine-events.jsonl",
    "log": "/var/log/vllm.log",
    "journal": "vllm.service",
    "files": "/var/log/lmcache-lookup-hashes",
    "metrics": "http://127.0.0.1:8000/metrics",
    "otlp": "4317",
    "kv-events": "tcp://127.0.0.1:5557",
}
