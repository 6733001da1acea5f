"""GPUDirect Storage: which path its bytes took, and what of them was seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from kvprobe import units
from kvprobe.digest import Document, label, number, pick
from kvprobe.reports._text.page import Page, heading, labelled


def gds(document: Document, page: Page) -> Iterator[RenderableType]:
    """Lines of the section; nothing where nothing went through libcufile."""
    found = pick(document, "gds")
    if not found:
        return
    yield heading("GPUDirect Storage", "calls of libcufile")
    lines = [("path", f"{label(found, 'path') or 'unknown'}: {label(found, 'why') or ''}")]
    for name in ("reads", "writes"):
        lines += _transfers(name, pick(found, name))
    yield labelled([*lines, ("nvidia-fs", _driver(pick(found, "driver")))])


def _transfers(name: str, side: Any) -> Iterator[tuple[str, str]]:
    calls, handed = number(side, "calls") or 0, number(side, "handed_over") or 0
    failed = number(side, "failed") or 0
    if not calls + handed + failed:
        return
    text = f"{units.count(calls)} calls, {units.size(number(side, 'bytes'))}"
    text += f", {units.count(failed)} failed" if failed else ""
    yield name, text
    if calls:
        below = number(side, "below_ops"), number(side, "below_bytes")
        block = number(side, "block_requests"), number(side, "block_bytes")
        yield "", f"by system calls of the library: {_amount(*below)}"
        yield "", f"block requests: {_amount(*block)}"
        yield "", f"neither: {_amount(number(side, 'unseen_calls'), number(side, 'unseen_bytes'))}"
    if nameless := number(side, "nameless_calls"):
        amount = _amount(nameless, number(side, "nameless_bytes"))
        yield "", f"files not known, and in none of these: {amount}"
    if handed:
        amount = _amount(handed, number(side, "handed_over_bytes"))
        yield "", f"by streams and batches, asked for and not timed: {amount}"


def _amount(count: float | None, size: float | None) -> str:
    return "unknown" if count is None else f"{units.count(count)}, {units.size(size)}"


def _driver(driver: Any) -> str:
    loaded = pick(driver, "loaded")
    if loaded is None:
        return "unknown"
    if not loaded:
        return "not loaded"
    if number(driver, "reads") is None:
        return "loaded; its statistics are off"
    counted = [
        f"{name} {_amount(number(driver, name), number(driver, f'{name[:-1]}_bytes'))}"
        for name in ("reads", "writes")
    ]
    return f"loaded; it counted {', '.join(counted)}"
