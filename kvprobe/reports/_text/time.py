"""Where the time went: parts of the restores, spans of the time to first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from kvprobe import bars, digest, units
from kvprobe.digest import Document, Part, number, pick, rows
from kvprobe.reports._text.page import (
    PART_STYLES,
    Column,
    Page,
    heading,
    labelled,
    paragraph,
    table,
)


def restore_parts(document: Document, page: Page) -> Iterator[RenderableType]:
    """The stacked bar and its table: device, block queue, software, idle."""
    items = digest.split_restores(document)
    parts = digest.parts(items, "restore", digest.RESTORE_PARTS)
    n, unsplit = len(items), len(digest.restored(document)) - len(items)
    total = sum(part.total for part in parts)
    if not n:
        yield heading("Where restore time went")
        what = "no restore was timed"
        if unsplit:
            what = f"none of {unsplit:,} restores has all of its parts"
        yield paragraph(f"Unknown: {what}.")
        return
    yield heading("Where restore time went", f"{units.duration(total)} in {n:,} restores")
    bar = Text()
    for filled, style in zip(
        bars.stacked([part.total for part in parts], page.bar_width(4, most=96)),
        PART_STYLES,
        strict=True,
    ):
        bar.append(filled, style)
    yield paragraph(bar)
    yield table(page, _columns("each restore", shaded=True), parts)
    if unsplit:
        yield paragraph(f"{unsplit:,} more restores are not in it: a part of theirs is unknown.")


def ttft_spans(document: Document, page: Page) -> Iterator[RenderableType]:
    """Median and p90 of each span, and how much of all time it holds."""
    items = rows(document, "requests")
    parts = digest.parts(items, "spans", digest.SPANS)
    n = max((part.n for part in parts), default=0)
    if not n:
        yield heading("Time to first token")
        yield paragraph("Unknown: no request's time to first token was split.")
        return
    ttft = digest.numbers(items, "ttft_ns")
    yield heading(
        "Time to first token",
        f"median {units.duration(digest.quantile(ttft, 0.5))}, "
        f"p90 {units.duration(digest.quantile(ttft, 0.9))} of {len(ttft):,} requests",
    )
    yield table(page, _columns("each request", shaded=False, parts=parts), parts)


def attribution(document: Document, page: Page) -> Iterator[RenderableType]:
    """How sure it is which request the bytes belong to."""
    found = {name: number(document, "attributed_bytes", name) for name, _ in digest.ATTRIBUTION}
    whole = sum(count or 0 for count in found.values())
    if not whole:
        return
    requests = digest.attribution_requests(document)
    meanings = dict(digest.ATTRIBUTION)
    yield heading("How bytes were tied to requests", f"{units.size(whole)} read by the engine")
    yield table(
        page,
        [
            Column("class", lambda name: str(name), "left"),
            Column("bytes", lambda name: units.size(found[name])),
            Column("share", lambda name: units.share((found[name] or 0) / whole)),
            Column("requests", lambda name: units.count(requests[name])),
            Column("meaning", lambda name: meanings[name], "left", wraps=True),
        ],
        found,
    )


def read_ahead(document: Document, page: Page) -> Iterator[RenderableType]:
    """Buffered reads: what the page cache served and what was read for nothing."""
    found = pick(document, "read_ahead")
    ops = number(found, "ops")
    if not ops:
        return
    served, unused = number(found, "ops_without_device"), number(found, "unused_bytes")
    device = number(found, "device_bytes")
    yield heading("Buffered reads", f"{units.count(ops)} reads")
    yield labelled(
        [
            (
                "page cache",
                f"{units.count(served)} reads ({units.share((served or 0) / ops)}) and "
                f"{units.size(number(found, 'cached_bytes'))} came from memory, not the device",
            ),
            (
                "read-ahead",
                f"the device read {units.size(device)} for "
                f"{units.size(number(found, 'asked_bytes'))} asked; {units.size(unused)}"
                + (f" ({units.share(unused / device)})" if unused is not None and device else "")
                + " were never asked for",
            ),
        ]
    )


def _columns(each: str, *, shaded: bool, parts: Sequence[Part] = ()) -> list[Column]:
    """Columns for parts of a total; a shade that names the part in the bar, or a bar of its own."""
    shades = {name: index for index, (name, _, _) in enumerate(digest.RESTORE_PARTS)}

    def name(part: Part) -> Text:
        if not shaded:
            return Text(part.name)
        index = shades[part.key]
        return Text.assemble((bars.SHADES[index], PART_STYLES[index]), f" {part.name}")

    largest = max((part.total for part in parts), default=0)

    def bar(part: Part) -> Text:
        length = round(part.total / largest * 12) if largest else 0
        return Text("█" * length, "cyan")

    columns = [
        Column("part" if shaded else "span", name, "left"),
        Column("share", lambda part: units.share(part.share)),
        Column("total", lambda part: units.duration(part.total if part.n else None)),
        Column("median", lambda part: units.duration(part.median)),
        Column("p90", lambda part: units.duration(part.p90)),
        Column("n", lambda part: units.count(part.n)),
        Column("meaning", lambda part: part.meaning, "left", from_width=90, wraps=True),
    ]
    if not shaded:
        columns.insert(2, Column("", bar, "left", from_width=110))
    return columns
