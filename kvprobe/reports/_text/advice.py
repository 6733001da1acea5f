"""What was found and what to change: evidence, doubt, commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprobe import digest, units
from kvprobe.digest import Document, label, number, pick, rows
from kvprobe.reports._text.head import change
from kvprobe.reports._text.page import SEVERITY_STYLES, Page, heading, labelled, paragraph


def findings(document: Document, page: Page) -> Iterator[RenderableType]:
    """The findings, gravest first."""
    items = sorted(rows(document, "findings"), key=digest.severity_rank, reverse=True)
    yield heading("Findings", f"{len(items):,}")
    if not items:
        yield paragraph("No known symptom was seen in this window.")
    for index, item in enumerate(items):
        if index:
            yield Text("")
        name = label(item, "severity") or "info"
        slug = label(item, "slug") or units.UNKNOWN
        title = Text.assemble((f"{name}: {slug}", SEVERITY_STYLES.get(name, "")))
        if subject := label(item, "subject"):
            title.append(f" on {subject}")
        title.append(f"  (confidence {units.fixed(number(item, 'confidence'))})")
        yield paragraph(title)
        pairs = [("evidence" if place == 0 else "", evidence(row))
                 for place, row in enumerate(rows(item, "evidence"))]  # fmt: skip
        pairs.append(("would disprove", label(item, "would_disprove") or units.UNKNOWN))
        pairs.append(("what to do", f"kvprobe playbook {slug}"))
        yield labelled(pairs, indent=3)


def evidence(row: Any) -> str:
    """``metric: value (n = ...)``."""
    value = units.quantity(number(row, "value"), label(row, "unit"))
    n = units.count(number(row, "n"))
    return f"{label(row, 'metric') or units.UNKNOWN}: {value} (n={n})"


def proposals(document: Document, page: Page) -> Iterator[RenderableType]:
    """What a tuner would change, or the measurement it lacks."""
    items = rows(document, "proposals")
    yield heading("Proposals", f"{len(items):,}")
    if not items:
        yield paragraph("Nothing was measured that a setting would make better.")
    for index, item in enumerate(items):
        if index:
            yield Text("")
        yield paragraph(_title(item))
        yield labelled(list(_proposal(item)), indent=3)


def _title(item: Any) -> Text:
    knob = label(item, "knob") or units.UNKNOWN
    title = Text(f"{knob}", "bold")
    if target := label(item, "target"):
        title.append(f" of {target}", "")
    if label(item, "needs") is None:
        title.append(f": {change(item)}")
    else:
        title.append(": measure first")
    return title


def _proposal(item: Any) -> Iterator[tuple[str, str]]:
    yield "why", label(item, "reason") or units.UNKNOWN
    if finding := label(item, "finding"):
        yield "answers", finding
    if needs := label(item, "needs"):
        yield "needs", needs
        return
    yield "expected", effect(item)
    for key, name in (("risk", "risk"), ("give_up", "give up if")):
        if text := label(item, key):
            yield name, text
    live = pick(item, "live")
    how = {True: " (takes effect at once)", False: " (needs a restart)"}.get(live, "")
    if text := label(item, "apply"):
        yield "apply", text + how
    if text := label(item, "undo"):
        yield "undo", text


def effect(item: Any) -> str:
    """``metric: -64.0 % (-71.0 to -52.0)`` with the level of the interval."""
    found = pick(item, "effect")
    unit = label(found, "unit") or "share"
    mid, low, high = (number(found, key) for key in ("mid", "low", "high"))
    if mid is None:
        return units.UNKNOWN
    shows = {"share": units.share, "ns": units.duration, "B": units.size, "B/s": units.rate}
    text = units.interval(mid, low, high, shows.get(unit, units.count))
    if unit not in shows:
        text += f" {unit}"
    metric = (label(found, "metric") or units.UNKNOWN).removesuffix("_ns").replace("_", " ")
    return f"{metric}: {text}, 90 % interval"
