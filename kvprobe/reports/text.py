"""The report for a person: what is missing first, then the answer, then what stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import RenderableType

from kvprobe.digest import printable
from kvprobe.reports import Report
from kvprobe.reports._text.advice import findings, proposals
from kvprobe.reports._text.break_even import break_even
from kvprobe.reports._text.devices import devices
from kvprobe.reports._text.gds import gds
from kvprobe.reports._text.gpus import gpus
from kvprobe.reports._text.head import answer, head, next_steps
from kvprobe.reports._text.ledger import ledger
from kvprobe.reports._text.page import NARROWEST, WIDEST, Page, print_page
from kvprobe.reports._text.time import attribution, read_ahead, restore_parts, ttft_spans

Section = Callable[[Mapping[str, Any], Page], Iterator[RenderableType]]

SUMMARY: Sequence[Section] = (head, answer, restore_parts, next_steps)
WHOLE: Sequence[Section] = (
    head,
    answer,
    restore_parts,
    ttft_spans,
    ledger,
    attribution,
    read_ahead,
    break_even,
    devices,
    gpus,
    gds,
    findings,
    proposals,
)


def render(
    document: Mapping[str, Any],
    *,
    source: str | None = None,
    width: int = 100,
    color: bool = False,
    ascii_only: bool = False,
    requests: str = "10",
    summary: bool = False,
    **_: object,
) -> str:
    """The report as text.

    Args:
        document: the report document; any leaf may be null and shows as ``unknown``.
        source: name of the capture, for the first lines.
        width: columns of the page; kept between 60 and 200.
        color: whether to colour with terminal escapes.
        ascii_only: whether to draw with ASCII characters only.
        requests: ``all``, a number of the worst, an id (``id:7`` where it is a number), or a part
            of an id that only one request has.
        summary: the first screen only.

    Raises:
        KvprobeError: ``requests`` names no request.
    """
    shown_source = None if source is None else printable(source)
    page = Page(max(NARROWEST, min(WIDEST, width)), shown_source, requests)
    sections = (section(document, page) for section in (SUMMARY if summary else WHOLE))
    return print_page(chain.from_iterable(sections), page, color=color, ascii_only=ascii_only)


REPORT = Report("text", "for a person to read, on a terminal or in a mail", render)
