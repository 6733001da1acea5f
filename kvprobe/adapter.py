"""What an engine adapter is made of.

An adapter does no I/O of its own but in ``facts`` and ``detect``. It declares what its engine says
and how each message is read; ``kvprobe.signals`` follows the logs, receives the spans, scrapes the
metrics, and puts what several of them say of one request together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvprobe.clock import Moment
from kvprobe.model import EngineFacts, EngineSetting

# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class KVPath:
    """A file name recognised as KV cache: ``key`` joins lookups, reads and engine events.

    ``shared``: the file holds the chunks of many prompts (a pool, a bucket, a slot file), so that
    testing or opening it says nothing of a prompt.
    """

    key: str
    temporary: bool = False
    shared: bool = False


# ---------------------------------------------------------------- what engines say


@dataclass(frozen=True)
class RequestNews:
    """What one message says of one request; what it does not say is absent.

    ``times`` and ``tokens`` have the names of ``requests`` columns. ``keys`` are the chunk keys of
    the whole prompt in its order. ``units`` are hits counted in files instead of tokens, under the
    names of token columns: so many of the ``of_units`` files that the whole units of the prompt
    make on all ranks. They become tokens once the length of a unit and of the prompt are known;
    ``tokens`` of any message go before them. ``internal``: the id is one that the engine made from
    the client's by appending ``-`` and 8 random hex digits (vLLM), unless it was told not to.
    ``finished``: this signal will say no more of the request.
    """

    id: str
    times: Mapping[str, Moment] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    of_units: int = 0
    keys: tuple[str, ...] = ()
    internal: bool = False
    finished: bool = False


News = RequestNews | EngineFacts
"""What a message says: of a request, or of the engine."""


@dataclass(frozen=True)
class LogLine:
    """One kind of line in an engine's log.

    ``mark`` is text that every such line has (it is found in whole blocks of the log before any
    line is looked at), ``pattern`` is searched in the line without colours, ``read`` makes news of
    the match and of when the line was written (None: the line does not tell); None of it: nothing.
    """

    name: str
    mark: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str], Moment | None], News | None]


@dataclass(frozen=True)
class JsonFiles:
    """Files of one JSON object a line that an engine writes into a folder, under new names.

    ``names`` is matched against the whole file name; ``read`` gets the object and a function that
    makes a ``Moment`` of wall clock nanoseconds. It raises nothing but KeyError, TypeError,
    ValueError, AttributeError, IndexError and OverflowError on objects that it does not understand.
    """

    names: re.Pattern[str]
    read: Callable[[Mapping[str, Any], Callable[[int], Moment]], Sequence[News]]


class Span(NamedTuple):
    """One OpenTelemetry span; attribute values are str, bool, int or float."""

    name: str
    start_wall_ns: int
    end_wall_ns: int
    attributes: Mapping[str, Any]
    service: str | None = None


class Sample(NamedTuple):
    """One sample of a Prometheus page, as ``prometheus_client`` parses it."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Total:
    """A counter of the engine that kvprobe has a figure of its own for.

    ``name`` is engine-neutral: ``read_bytes``, ``chunk_hits`` (files found by look-ups),
    ``prompt_tokens``, ``device_hit_tokens``, ``offload_hit_tokens``. ``metric`` is the sample's
    name, ``labels`` are patterns that its labels must match as a whole.
    """

    name: str
    metric: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """What of an engine's Prometheus page matters, and what it tells of the engine itself.

    ``keep`` is matched from the start of a sample's name. ``totals`` are among what is kept.
    """

    keep: re.Pattern[str]
    facts: Callable[[Sequence[Sample]], EngineFacts | None] | None = None
    totals: tuple[Total, ...] = ()


@dataclass(frozen=True)
class SignalBatch:
    """New facts from an engine's request signal; rows are dicts with ``schema`` columns.

    ``counters`` are rows of ``host``: the engine's own counters.
    """

    requests: Sequence[Mapping[str, Any]] = ()
    keys: Sequence[Mapping[str, Any]] = ()
    engine: EngineFacts | None = None
    understood: int = 0
    ignored: int = 0
    counters: Sequence[Mapping[str, Any]] = ()


class Signal(Protocol):
    """A stream of request rows: an event file, or several feeds put together."""

    def poll(self) -> SignalBatch:
        """Return what is new; never blocks."""
        ...

    def end(self) -> SignalBatch:
        """Return what there is as the window ends: counters stop here."""
        ...

    def close(self) -> SignalBatch:
        """Return the rest, requests that never finished included; may wait for it."""
        ...


# ---------------------------------------------------------------- engines that run here


@dataclass(frozen=True)
class SignalPlace:
    """Where a signal can be read. ``kind`` and ``target`` are written ``kind:target``.

    ``events:FILE``, ``log:FILE``, ``journal:UNIT``, ``files:FOLDER``, ``metrics:URL``,
    ``otlp:[HOST:]PORT`` (kvprobe listens there), ``kv-events:ENDPOINT`` (ZMQ).
    """

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it. ``log`` is the file that stdout or stderr goes to.

    Paths are those that the process sees; ``seen_from`` is the prefix by which others can open
    them, empty where that is the same.
    """

    pid: int
    parent: int
    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None = None
    log: str | None = None
    seen_from: str = ""


@dataclass(frozen=True)
class RunningEngine:
    """An engine found in the process table.

    ``roots`` are the folders (or devices) of its KV cache, ``signals`` what can be read from it
    as it runs, ``advice`` one sentence each: the option to add for a better signal. ``shape`` is
    the engine's options in a few words.
    """

    engine: str
    pid: int
    shape: str
    roots: tuple[str, ...] = ()
    signals: tuple[SignalPlace, ...] = ()
    advice: tuple[str, ...] = ()
    facts: EngineFacts | None = None


# ---------------------------------------------------------------- the adapter


@dataclass(frozen=True)
class Engine:
    """One engine adapter, exported as ``ENGINE`` by its file.

    ``recognise`` maps a path to its KV key or None. ``translate`` puts an engine-neutral knob
    (``unit_bytes``, ``bytes_in_flight``, ``prefetch_horizon``) in its words.
    """

    name: str
    summary: str
    recognise: Callable[[str], KVPath | None]
    translate: Callable[[str, int, EngineFacts], EngineSetting]
    facts: Callable[[str], EngineFacts | None] | None = None
    """What the engine's own files below a root directory tell; None where they tell nothing."""
    detect: Callable[[Process], RunningEngine | None] | None = None
    """What a process is, if it is this engine's main one; reads small files (configs) at most."""
    log_lines: tuple[LogLine, ...] = ()
    read_span: Callable[[Span, Callable[[int], Moment]], News | None] | None = None
    """News of an OpenTelemetry span; the function makes a ``Moment`` of wall clock nanoseconds."""
    metrics: Metrics | None = None
    json_files: tuple[JsonFiles, ...] = ()
    publishes_kv_events: bool = False
    """Whether it can publish vLLM's KV events over ZMQ."""
    describes_files: bool = True
    """False: its files follow the path scheme of another engine, whose adapter claims them."""
