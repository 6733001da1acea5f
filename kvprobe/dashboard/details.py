"""The text of the modal pages: one request, one finding, the keys. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.dashboard.panels import SEVERITY_STYLES
from kvprobe.dashboard.table import PART_STYLES, estimate_text, gain, part_bar, verdict
from kvprobe.digest import Document, label, number, pick, rows
from kvprobe.gpu_words import BOUNDS

SPAN_STYLES = ("#8787af", "#5fd7d7", "#ffd787", "#ff5f87", "#d7875f", "#87d75f", "#bcbcbc")
"""Colours of spans, in the order of ``digest.SPANS``."""


def request_text(row: Any, width: int) -> RenderableType:
    """Everything about one request: tokens, verdict, waterfall of its spans, its restore."""
    tokens = ", ".join(
        f"{name} {units.count(number(row, 'tokens', key))}"
        for key, name in (
            ("prompt", "prompt"),
            ("stored", "stored"),
            ("storage_hit", "restored"),
            ("computed", "computed"),
        )
    )
    facts = pairs(
        [
            ("TTFT", Text(units.duration(number(row, "ttft_ns")), "bold")),
            ("verdict", Text.assemble(verdict(row), "  gain ", gain(row))),
            ("recompute", estimate_text(row)),
            ("tokens", tokens),
            *([("prefill", _prefill(row))] if pick(row, "prefill") else ()),
            ("tied by", _attribution(row)),
        ]
    )
    return Group(facts, Text(""), *_spans(row, width), Text(""), *_restore(row, width))


def pairs(named: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and texts; a long text wraps under itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in named:
        grid.add_row(name, Text(text) if isinstance(text, str) else text)
    return grid


def _prefill(row: Any) -> str:
    """What bound it, as far as its GPU's samples tell of prefills of its size."""
    prefill = pick(row, "prefill")
    bound = label(prefill, "bound") or "unknown"
    text = f"bound by {BOUNDS.get(bound, bound)}"
    least = number(prefill, "least_ns")
    if least is None:
        return text
    share = units.share(number(prefill, "share"))
    return f"{text}; at least {units.duration(least)} by its arithmetic, {share} of what it took"


def _attribution(row: Any) -> str:
    shares = [
        f"{name} {units.share(part)}"
        for name, _ in digest.ATTRIBUTION
        if (part := number(row, "attribution", name))
    ]
    return ", ".join(shares) or "nothing was restored"


def _spans(row: Any, width: int) -> Iterator[Text]:
    if not pick(row, "spans"):
        yield Text("time to first token: not split yet", "dim")
        return
    values = [number(row, "spans", key) for key, _, _ in digest.SPANS]
    bar = max(10, width - 27)
    yield Text("Time to first token", "bold")
    named = zip(digest.SPANS, values, bars.waterfall(values, bar), SPAN_STYLES, strict=True)
    for (_, name, _), value, line, style in named:
        yield Text.assemble(f"{name:<15} {units.duration(value):>9} ", (line, style))


def _restore(row: Any, width: int) -> Iterator[Text]:
    restore = pick(row, "restore")
    if not restore:
        yield Text("This request restored nothing from storage.", "dim")
        return
    yield Text.assemble(
        ("Its restore", "bold"),
        f"  {units.size(number(restore, 'bytes'))} in {units.count(number(restore, 'ops'))} reads, "
        f"{units.count(number(restore, 'commands'))} block requests, "
        f"depth {units.fixed(number(restore, 'effective_depth'))}",
    )
    if bar := part_bar(row, max(10, width - 1)):
        yield bar
    for index, (key, name, meaning) in enumerate(digest.RESTORE_PARTS):
        value = units.duration(number(restore, key))
        yield Text.assemble(
            (bars.SHADES[index], PART_STYLES[index]), f" {name:<13} {value:>9} ", (meaning, "dim")
        )
    hidden = units.duration(number(restore, "hidden_ns"))
    yield Text.assemble(f"  {'hidden':<13} {hidden:>9} ", ("behind its own prefill", "dim"))


def finding_text(document: Document, finding: Any) -> RenderableType:
    """One finding with its evidence and what would be changed about it."""
    name = label(finding, "severity") or "info"
    slug = label(finding, "slug") or "?"
    head = Text.assemble((f"{name}: {slug}", SEVERITY_STYLES.get(name, "")))
    if subject := label(finding, "subject"):
        head.append(f" on {subject}", "none")
    said: list[tuple[str, str | Text]] = []
    said.append(("confidence", units.fixed(number(finding, "confidence"))))
    for row in rows(finding, "evidence"):
        value = units.quantity(number(row, "value"), label(row, "unit"))
        n = units.count(number(row, "n"))
        said.append(("evidence", f"{label(row, 'metric') or '?'}: {value} (n={n})"))
    said.append(("would disprove", label(finding, "would_disprove") or units.UNKNOWN))
    for proposal in rows(document, "proposals"):
        if label(proposal, "finding") == slug:
            said.append(("proposal", _proposal(proposal)))
    return Group(head, pairs(said))


def _proposal(proposal: Any) -> str:
    knob = label(proposal, "knob") or "?"
    if needs := label(proposal, "needs"):
        return f"{knob}: measure first: {needs}"
    sides = []
    for key in ("current", "proposed"):
        value = number(proposal, key)
        shown = label(proposal, key) or units.UNKNOWN
        if value is not None:
            shown = units.quantity(value, label(proposal, "unit"))
        sides.append(shown)
    reason = label(proposal, "reason")
    return f"{knob}: {sides[0]} → {sides[1]}" + (f"; {reason}" if reason else "")


def help_text() -> RenderableType:
    """The keys and what the columns mean."""
    parts = Text("where its restore time went:")
    for shade, style, (_, name, _) in zip(
        bars.SHADES, PART_STYLES, digest.RESTORE_PARTS, strict=True
    ):
        parts.append(f" {shade}", style).append(f" {name}", "none")
    keys = [
        ("Enter", "the request's whole story"),
        ("f", "findings with evidence, proposals and playbooks"),
        ("d", "devices: paths, where commands' time goes, each queue"),
        ("g", "GPUs: what they did, what bound the prefills, what restores cost them"),
        ("s", "next order; a click on a heading sorts by it"),
        ("space", "hold the screen; a replay halts, a live source goes on"),
        ("+ - r", "a replay faster, slower, from the start"),
        ("q", "quit"),
    ]
    columns: list[tuple[str, str | Text]] = [
        ("TTFT", "time to first token; in italics: still waiting, its age"),
        ("stored", "tokens that storage held for this request"),
        ("parts", parts),
        ("restore", "restore before its own prefill; what runs beside it costs nothing"),
        ("compute", "what prefilling those tokens would have cost on this node"),
        ("verdict", "was the engine's choice the cheaper one? open: too close to say"),
        ("gain", "time saved against the other choice; negative is lost"),
        ("tied", "how its bytes are known to be its own: exact, thread, window, shared"),
    ]
    return Group(
        Text("Keys", "bold"),
        pairs(keys),
        Text("\nColumns", "bold"),
        pairs(columns),
        Text("\nUnknown is ?, never 0. The same figures: kvprobe report", "dim"),
    )
