"""First screen: what was recorded, how whole it is, what it cost, and the answer in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprobe import digest, units
from kvprobe.digest import Document, label, number, pick, printable, rows
from kvprobe.model import Verdict
from kvprobe.reports._text.page import SEVERITY_STYLES, Page, labelled, paragraph

_YEAR_9999_NS = 253_370_764_800 * 10**9


def head(document: Document, page: Page) -> Iterator[RenderableType]:
    """What is missing first, then where the figures come from."""
    pairs: list[tuple[str, str | Text]] = []
    if pick(document, "capture", "complete") is not True:
        pairs.append(("INCOMPLETE", Text(_incomplete(document), "bold red")))
    if lossy := _losses(document):
        pairs.append(("LOSSES", Text(lossy, "bold yellow")))
    pairs += [
        ("capture", page.source or label(document, "capture", "id") or units.UNKNOWN),
        ("engine", _engine(document)),
        ("window", _window(document)),
    ]
    if filters := _filters(document):
        pairs.append(("filters", filters))
    if not lossy:
        pairs.append(("losses", "none lost, none thinned" if pick(document, "losses") else
                      "unknown"))  # fmt: skip
    pairs.append(("own cost", _cost(document)))
    pairs += [("note", text) for text in _notes(document)]
    yield labelled(pairs, indent=0)


def headline(document: Document) -> str:
    """The answer in one sentence."""
    counts = digest.verdicts(document)
    restored = digest.restored(document)
    if not rows(document, "requests"):
        return "No request was seen in this window."
    won = counts[Verdict.RESTORE_WON]
    said = [f"Restoring paid off for {won:,} of {len(restored):,} requests that restored"]
    undecided = digest.undecided_restores(document)
    if restored and undecided["unknown"] == len(restored):
        n = undecided.pop("unknown")
        said = [f"Whether restoring paid off is unknown for all {n:,} requests that restored"]
    if not restored:
        hits = sum(1 for row in rows(document, "requests") if number(row, "tokens", "storage_hit"))
        said = ["No request restored KV cache from storage"]
        if hits:
            said = [
                f"{hits:,} requests restored, says the engine, but none of their reads was seen"
            ]
    for verdict, what in (
        (Verdict.RESTORE_LOST, "restores lost"),
        (Verdict.RECOMPUTE_LOST, "recomputed prefixes lost"),
    ):
        regrets = [
            value
            for row in rows(document, "requests")
            if label(row, "verdict") == verdict and (value := digest.regret_ns(row)) is not None
        ]
        if counts[verdict]:
            total = units.duration(sum(regrets)) if regrets else "an unknown time"
            said.append(f"{counts[verdict]:,} {what} {total} in total")
    said += [f"{n:,} are {word}" for word, n in sorted(undecided.items())]
    said.append(_break_even(document))
    return "; ".join(said) + "."


def _break_even(document: Document) -> str:
    tokens = number(document, "break_even", "tokens")
    if tokens is None:
        note = label(document, "break_even", "note")
        return f"break-even unknown: {note}" if note else "break-even unknown"
    low = units.count(number(document, "break_even", "tokens_low"))
    high = units.count(number(document, "break_even", "tokens_high"))
    if units.UNKNOWN in (low, high):
        return f"break-even at {units.count(tokens)} tokens (interval unknown)"
    return f"break-even at {units.count(tokens)} tokens ({low}{units.DASH}{high} at 90 %)"


def answer(document: Document, page: Page) -> Iterator[RenderableType]:
    """The headline, set apart."""
    yield Text("")
    yield paragraph(Text(headline(document), "bold"), indent=0)


def next_steps(document: Document, page: Page) -> Iterator[RenderableType]:
    """The end of the summary: one line a finding and a proposal, and how to see the rest."""
    lines: list[tuple[str, str | Text]] = []
    graded = sorted(rows(document, "findings"), key=digest.severity_rank, reverse=True)
    for finding in graded:
        name = label(finding, "severity") or "info"
        slug = Text(label(finding, "slug") or units.UNKNOWN, SEVERITY_STYLES.get(name, ""))
        subject = label(finding, "subject")
        lines.append((name, slug.append(f" on {subject}", "none") if subject else slug))
    for proposal in rows(document, "proposals"):
        knob = label(proposal, "knob") or units.UNKNOWN
        needs = label(proposal, "needs")
        what = f"measure first: {needs}" if needs else change(proposal)
        lines.append(("propose", f"{knob}: {what}"))
    if not lines:
        lines = [("findings", "none")]
    yield Text("")
    yield labelled(lines, indent=0)
    pairs = [("what to do", "kvprobe playbook SLUG")] if graded else []
    if page.source:
        pairs.append(("the whole", f"kvprobe report {page.source}"))
    yield Text("")
    yield labelled(pairs, indent=0)


def change(proposal: Any) -> str:
    """``current -> proposed`` of a proposal, in its unit."""
    unit = label(proposal, "unit")
    sides = []
    for key in ("current", "proposed"):
        value = number(proposal, key)
        text = label(proposal, key)
        sides.append(units.quantity(value, unit) if value is not None else text or units.UNKNOWN)
    return " → ".join(sides)


def _incomplete(document: Document) -> str:
    if pick(document, "capture", "complete") is None:
        return "unknown whether the recording ended in order"
    return "the recording was cut short: its last second may be missing"


def _losses(document: Document) -> str:
    said = []
    for table, got, lost, thinned in digest.losses(document):
        whole = got + lost + thinned
        parts = []
        if lost:
            parts.append(f"{lost:,} lost ({units.share(lost / whole)})")
        if thinned:
            parts.append(f"{thinned:,} thinned on purpose ({units.share(thinned / whole)})")
        said.append(f"{table}: {', '.join(parts)} of {whole:,} rows")
    return "; ".join(said)


def _engine(document: Document) -> str:
    engine = pick(document, "capture", "engine")
    name = label(engine, "name") or label(document, "capture", "engine")
    if name is None:
        return "unknown: no engine signal"
    said = [name]
    if model := label(engine, "model"):
        said.append(model)
    tokens, size = number(engine, "unit_tokens"), number(engine, "unit_bytes")
    if tokens is not None or size is not None:
        said.append(f"units of {units.count(tokens)} tokens, {units.size(size)}")
    direct = pick(engine, "direct")
    if isinstance(direct, bool):
        said.append("direct reads" if direct else "buffered reads")
    if (reads := number(engine, "reads_in_flight")) is not None:
        said.append(f"{units.count(reads)} in flight")
    if prefill := label(engine, "prefill"):
        said.append(f"prefill {prefill}")
    return "; ".join(said)


def _window(document: Document) -> str:
    capture = pick(document, "capture")
    said = [units.duration(number(capture, "duration_ns"))]
    start = number(capture, "start_wall")
    if start is not None and 0 <= start < _YEAR_9999_NS:
        said.append(f"from {datetime.fromtimestamp(start / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC")
    if host := label(capture, "host"):
        said.append(f"on {host}")
    if kernel := label(capture, "kernel"):
        said.append(f"Linux {kernel}")
    return ", ".join(said)


def _filters(document: Document) -> str:
    """What was left out on purpose while recording; empty where nothing was."""
    filters = pick(document, "capture", "filters")
    said = []
    if root := label(filters, "root"):
        said.append(f"root {root}")
    tgids = pick(filters, "tgids")
    if isinstance(tgids, list) and tgids:
        names = [units.UNKNOWN if tgid is None else printable(str(tgid)) for tgid in tgids]
        said.append(f"{'process' if len(names) == 1 else 'processes'} {', '.join(names)}")
    device = number(filters, "device")
    if device is not None:
        said.append(f"device {_device_name(document, int(device))}")
    every = number(filters, "keep_one_in")
    if every is not None and every > 1:
        said.append(f"one block row in {units.count(every)} kept")
    fast = number(filters, "min_latency_ns")
    if fast is not None and fast > 0:
        said.append(f"faster than {units.duration(fast)} left out")
    return "; ".join(said)


def _device_name(document: Document, device: int) -> str:
    """Its name where it is among the devices, else ``major:minor`` of its dev_t."""
    for row in rows(document, "devices"):
        if number(row, "facts", "device") == device and (name := label(row, "name")):
            return name
    return f"{device >> 20}:{device & 0xFFFFF}"


def _cost(document: Document) -> str:
    cost = pick(document, "cost")
    said = []
    if (per_event := number(cost, "probe_ns_per_event")) is not None:
        runs = units.count(number(cost, "probe_runs"))
        said.append(f"{units.duration(per_event)} an event (n={runs})")
    for key, name in (("probe_cpu_share", "probes"), ("agent_cpu_share", "kvprobe")):
        if (share := number(cost, key)) is not None:
            said.append(f"{name} {units.share(share)} of one core")
    if (budget := number(cost, "budget_share")) is not None:
        said.append(f"budget {units.share(budget)}")
    return "; ".join(said) or units.UNKNOWN


def _notes(document: Document) -> Iterator[str]:
    """What a reader must know before the figures: notes, blind spots, a signal half understood."""
    notes = pick(document, "capture", "notes")
    for note in notes if isinstance(notes, list) else ():
        yield label({"note": note}, "note") or units.UNKNOWN
    for gap in rows(document, "missing"):
        what, effect = label(gap, "what") or units.UNKNOWN, label(gap, "effect")
        yield f"not seen: {what}" + (f"; {effect}" if effect else "")
    ignored = number(document, "capture", "signal", "ignored")
    if ignored:
        yield f"{ignored:,} lines of the engine's signal were not understood"
    steps = number(document, "capture", "clock", "steps")
    if steps:
        yield f"the wall clock was set {steps:,} times during the window"
