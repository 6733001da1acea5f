"""The text of each panel, made from a document; pure functions that know nothing of Textual."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.dashboard.feed import Position, Snapshot
from kvprobe.digest import Document, label, number, pick, rows
from kvprobe.model import Verdict

SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_SEPARATOR = "  "


def fitted(segments: Iterable[Text], width: int) -> Text:
    """As many of the segments as fit on one line, the first ones first."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for segment in segments:
        more = segment.cell_len + (len(_SEPARATOR) if line.plain else 0)
        if line.plain and line.cell_len + more > width:
            break
        if line.plain:
            line.append(_SEPARATOR)
        line.append_text(segment)
    return line


def title_line(document: Document | None, mode: str, width: int) -> Text:
    """Who is watched: engine, model, host, loader, window."""
    engine = pick(document, "capture", "engine")
    segments = [Text("kvprobe top", "bold"), Text(mode, "bold green" if mode == "live" else "bold")]
    name = label(engine, "name")
    if document is not None:
        segments.append(Text(name, "cyan") if name else Text("no engine signal", "dim"))
    span = number(document, "capture", "duration_ns")
    if span is not None:
        segments.append(Text(f"last {units.duration(span)}"))
    for text in (
        label(engine, "model"),
        label(document, "capture", "host"),
        label(document, "capture", "loader"),
    ):
        if text:
            segments.append(Text(text))
    return fitted(segments, width)


def answer_line(document: Document | None, width: int) -> Text:
    """What is missing first; then whether restoring pays, and what watching costs."""
    if document is None:
        return Text("")
    segments = list(_losses(document))
    restored = len(digest.restored(document))
    if restored:
        won = digest.verdicts(document)[Verdict.RESTORE_WON]
        unknown = digest.undecided_restores(document)["unknown"]
        if unknown == restored:
            segments.append(Text(f"paid off: unknown for all {restored:,}", "bold"))
        else:
            more = f", {unknown:,} unknown" if unknown else ""
            segments.append(Text(f"paid off {won:,}/{restored:,}{more}", "bold"))
    tokens = number(document, "break_even", "tokens")
    if tokens is not None:
        low, high = (number(document, "break_even", f"tokens_{end}") for end in ("low", "high"))
        text = units.interval(tokens, low, high, units.count)
        segments.append(Text(f"break-even {text}"))
    if not any(True for _ in digest.losses(document)):
        segments.append(Text("no losses", "dim"))
    cost = number(document, "cost", "probe_ns_per_event")
    if cost is not None:
        segments.append(Text(f"cost {units.duration(cost)}/event", "dim"))
    share = number(document, "cost", "probe_cpu_share")
    if share is not None:
        segments.append(Text(f"{units.share(share)} of a core", "dim"))
    return fitted(segments, width)


def _losses(document: Document) -> Iterable[Text]:
    tables = digest.losses(document)
    lost = sum(row[2] for row in tables)
    thinned = sum(row[3] for row in tables)
    if lost:
        yield Text(f"{lost:,} rows LOST", "bold red")
    if thinned:
        yield Text(f"{thinned:,} thinned", "yellow")


def waiting_text(snapshot: Snapshot) -> Text:
    """Shown in place of an empty request table: what is here, and what is being waited for."""
    document = snapshot.document
    if document is None:
        return Text("Waiting for the first second of data ...")
    seen = {name: number(document, "losses", name, "rows") or 0 for name in ("ops", "block")}
    lines = [Text("Waiting for the first request ...", "bold"), Text("")]
    lines.append(
        Text(f"Seen so far: {seen['ops']:,} reads and writes, {seen['block']:,} block requests.")
    )
    if pick(document, "capture", "engine") is None:
        lines.append(
            Text(
                "The engine has said nothing yet: is --signal the file that it writes its request "
                "events to?"
            )
        )
    if not seen["ops"]:
        lines.append(
            Text("No I/O passes the filters: are --pid, --root and --device the engine's?")
        )
    return Text("\n").join(lines)


def problem_lines(snapshot: Snapshot, width: int, most: int = 2) -> Text:
    """What went wrong, newest last; one line each."""
    shown = snapshot.problems[-most:]
    hidden = len(snapshot.problems) - len(shown)
    lines = [Text(f"! {text}", "bold red") for text in shown]
    if hidden > 0 and lines:
        lines[0] = Text(f"! {hidden + 1} earlier: {shown[0]}", "bold red")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def devices_text(document: Document | None, width: int, height: int) -> Text:
    """One or two lines a device, the KV device first; those that did nothing are left out."""
    items = [row for row in rows(document, "devices") if _traffic(row)]
    if not items:
        return Text("no traffic on any device" if document else "", "dim")
    roomy = height >= 3 * len(items)
    lines: list[Text] = []
    shown = 0
    for item in items:
        more = _device_lines(document or {}, item, width, roomy)
        if lines and len(lines) + len(more) > height:
            break
        lines.extend(more)
        shown += 1
    if shown < len(items) and len(lines) < height:
        lines.append(Text(f"and {len(items) - shown} more", "dim"))
    return Text("\n").join(lines)


def _traffic(item: Any) -> float:
    return (number(item, "read_bytes") or 0) + (number(item, "write_bytes") or 0)


def _device_lines(document: Document, item: Any, width: int, roomy: bool) -> list[Text]:
    timeline = rows(item, "timeline")
    last: Any = timeline[-1] if timeline else None
    now = number(last, "depth_mean")
    mean, p99 = number(item, "depth", "mean"), number(item, "depth", "p99")
    reads = number(last, "read_bytes_per_s")
    if reads is None:
        reads = digest.mean_rate(document, item, "read")
    writes = number(last, "write_bytes_per_s")
    if writes is None:
        writes = digest.mean_rate(document, item, "write")
    depth = f"depth {units.fixed(now, 1)} now, " if now is not None else "depth "
    first = [
        Text(label(item, "name") or "?", "bold cyan"),
        Text(f"read {units.rate(reads)}"),
        Text(f"write {units.rate(writes)}"),
        Text(f"read {depth}{units.fixed(mean, 1)} mean, p99 {units.count(p99)}"),
        Text(f"no read {units.share(number(item, 'depth', 'time_at_zero_share'))}"),
        Text(f"transport {label(item, 'transport') or units.UNKNOWN}", "dim"),
    ]
    lines = [fitted(first, width)]
    if timeline or number(item, "read_latency", "median_ns") is not None:
        lines.append(_latency_line(item, timeline, width))
    if roomy and len(timeline) > 1:
        courses = (
            ("read rate", "", [number(row, "read_bytes_per_s") for row in timeline]),
            ("depth", "", [number(row, "depth_mean") for row in timeline]),
        )
        lines.append(_courses_line("  in time ", courses, width))
    return lines


Course = tuple[str, str, list[float | int | None]]
"""Name, figure of now, and the values over the window."""


def _latency_line(item: Any, timeline: Sequence[Any], width: int) -> Text:
    latency = pick(item, "read_latency")
    ends = [("p50", number(latency, "median_ns")), ("p95", number(latency, "p95_ns"))]
    if timeline:
        last = next((row for row in reversed(timeline) if number(row, "read_p50_ns")), None)
        ends = [(name, number(last, f"read_{name}_ns")) for name in ("p50", "p99")]
    courses = [
        (
            name,
            "-" if value is None else units.duration(value),
            [number(row, f"read_{name}_ns") for row in timeline],
        )
        for name, value in ends
    ]
    return _courses_line("  read latency ", courses, width)


def _courses_line(head: str, courses: Sequence[Course], width: int) -> Text:
    """Two figures with their course beside each, as wide as there is room."""
    line = Text(head, "dim", no_wrap=True, overflow="ellipsis")
    texts = [f"{name} {value}".rstrip() for name, value, _ in courses]
    room = (width - line.cell_len - sum(map(len, texts)) - 8) // 2
    for text, (_, _, values) in zip(texts, courses, strict=True):
        line.append(text, "none")
        if len(values) > 1 and room >= 6:
            line.append(f" {bars.sparkline(values, min(room, 30, len(values)))}", "cyan")
        line.append("  ")
    return line


def findings_text(document: Document | None, width: int, height: int) -> Text:
    """One line a finding, gravest first."""
    items = sorted(rows(document, "findings"), key=digest.severity_rank, reverse=True)
    if not items:
        return Text("nothing found so far" if document else "", "dim")
    lines = []
    for item in items:
        name = label(item, "severity") or "info"
        subject, slug = label(item, "subject"), label(item, "slug") or "?"
        line = Text.assemble((f"{name:<8} {slug}", SEVERITY_STYLES.get(name, "")))
        line.append(f"  {subject}" if subject else "")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(lines) > height > 0:
        rest = len(lines) - height + 1
        lines = [*lines[: height - 1], Text(f"and {rest} more: press f", "dim")]
    return Text("\n").join(lines)


def position_line(position: Position, paused: bool, width: int) -> Text:
    """How far a replay has come, and at which speed."""
    mark = "■ end" if position.ended else "⏸" if paused else "▶"
    text = f"{mark}  {clock(position.done_ns)} / {clock(position.total_ns)}  x{position.speed:g}  "
    keys = "  - + speed  r restart"
    bar = max(0, width - len(text) - len(keys))
    share = position.done_ns / position.total_ns if position.total_ns > 0 else 1.0
    if bar < 10:
        keys, bar = "", max(0, width - len(text))
    return Text.assemble(text, (bars.progress(share, bar), "cyan"), (keys, "dim"))


def clock(nanoseconds: int) -> str:
    """``m:ss`` of a replay."""
    seconds = max(0, nanoseconds) // 1_000_000_000
    return f"{seconds // 60}:{seconds % 60:02d}"
