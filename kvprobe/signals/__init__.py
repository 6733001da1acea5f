"""How engines are listened to: logs, spans, metrics, events; and what they say, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvprobe.adapter import News
from kvprobe.clock import WallClock


@dataclass(frozen=True)
class FeedBatch:
    """What one feed brought since the last poll.

    ``counters`` are rows of ``host``. ``understood`` and ``ignored`` count messages (lines, spans,
    pages); ``lost`` those that are known to have existed and never came. ``notes`` are sentences
    on what else was not heard.
    """

    news: Sequence[News] = ()
    counters: Sequence[Mapping[str, Any]] = ()
    understood: int = 0
    ignored: int = 0
    lost: int = 0
    notes: Sequence[str] = ()


class Feed(Protocol):
    """One place where an engine can be heard.

    ``last_word``: what it says of a request comes after what all other feeds say of it.
    """

    name: str
    last_word: bool

    def poll(self, clock: WallClock) -> FeedBatch:
        """Return what is new; never blocks."""
        ...

    def close(self, clock: WallClock) -> FeedBatch:
        """Stop, and return the rest."""
        ...
