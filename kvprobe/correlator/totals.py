"""What the engine itself counted in a window, beside what kvprobe saw."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvprobe import engines
from kvprobe.adapter import Metrics, Total
from kvprobe.correlator.counters import rises
from kvprobe.correlator.ledger import EngineTotal
from kvprobe.model import Frame

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def engine_totals(host: Frame, seen: Mapping[str, int]) -> tuple[EngineTotal, ...]:
    """The totals that adapters declare, where the engine's page has been scraped twice or more.

    A series that is not on the first page began at zero. A counter that goes back was set to zero
    by a restart.

    Args:
        host: frame of the ``host`` table.
        seen: kvprobe's own figures by the totals' names.
    """
    found = []
    for engine, metrics, pages in _scraped(host):
        for total in metrics.totals:
            rows = _rows(host, total)
            if len(rows):
                step = sum(float(steps.sum()) for _, steps in _series(host, rows, pages))
                counted = round(step)
                found.append(
                    EngineTotal(engine, total.name, counted, seen.get(total.name), len(pages))
                )
    return tuple(found)


def times_of_increase(host: Frame, name: str) -> tuple[Ints, Ints, Ints] | None:
    """When a total rose: after ``begin`` and by ``end``, both ascending; and the pages' times.

    None where no running engine counts it, or several do.
    """
    scraped = [
        (rows, pages)
        for _, metrics, pages in _scraped(host)
        for total in metrics.totals
        if total.name == name and len(rows := _rows(host, total))
    ]
    if len(scraped) != 1:
        return None
    rows, pages = scraped[0]
    rose = [time[steps > 0] for time, steps in _series(host, rows, pages)]
    end = np.unique(np.concatenate(rose))
    # Only what changed has a row, so the page before the rise is the last one with any news.
    begin = pages[np.maximum(np.searchsorted(pages, end) - 1, 0)]
    return begin, end, pages


def _scraped(host: Frame) -> Iterator[tuple[str, Metrics, Ints]]:
    """Engines whose page was scraped twice or more, and when there was news on it."""
    names = {str(name) for name in host["metric"]}
    for engine in engines.engines().values():
        if engine.metrics is None or not names:
            continue
        kept = [name for name in names if engine.metrics.keep.match(name)]
        pages = np.unique(host["time_ns"][np.isin(host["metric"], kept)])
        if len(pages) > 1:
            yield engine.name, engine.metrics, pages


def _rows(host: Frame, total: Total) -> Ints:
    """Samples of the counter with the labels that are meant."""
    rows = np.flatnonzero(host["metric"] == total.metric)
    fits = [_has_labels(subject or "", total.labels) for subject in host["subject"][rows]]
    found: Ints = rows[np.array(fits, bool)]
    return found


def _has_labels(subject: str, wanted: Mapping[str, str]) -> bool:
    """Whether ``a=b,c=d`` has each wanted label with a value that its pattern matches."""
    return all(
        re.search(rf"(?:^|,){re.escape(label)}={value}(?:,|$)", subject)
        for label, value in wanted.items()
    )


def _series(host: Frame, rows: Ints, pages: Ints) -> Iterator[tuple[Ints, Floats]]:
    """For each series its later times and how far it had gone up at each since the one before."""
    subjects = host["subject"][rows].astype(str)
    for subject in np.unique(subjects).tolist():
        series = rows[subjects == subject]
        series = series[np.argsort(host["time_ns"][series], kind="stable")]
        time, value = host["time_ns"][series], host["value"][series]
        if time[0] > pages[0]:
            time, value = np.concatenate([pages[:1], time]), np.concatenate([[0.0], value])
        yield time[1:], rises(value)
