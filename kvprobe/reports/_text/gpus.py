"""The GPUs: what they did, what held them back, what restores cost them, what bound prefills."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from kvprobe.digest import Document, rows
from kvprobe.gpu_words import PREFILLS, describe, name_of, why_unknown
from kvprobe.reports._text.page import Column, Page, heading, labelled, table


def gpus(document: Document, page: Page) -> Iterator[RenderableType]:
    """One block a device or MIG instance; nothing where there is none."""
    for item in rows(document, "gpus"):
        yield heading(*name_of(item))
        yield labelled(describe(item))
        groups = rows(item, "prefills")
        if groups:
            yield table(page, _PREFILLS, groups)
        if why := why_unknown(item):
            yield labelled([("unknown", why)])


_PREFILLS = [
    Column(
        title,
        value,
        justify="left" if title == "bound by" else "right",
        from_width=96 if title in ("time", "roofline") else 0,
    )
    for title, value in PREFILLS
]
