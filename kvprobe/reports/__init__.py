"""One file per output format; each exports ``REPORT`` and is found by its file name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One output format. ``name`` equals the stem of its file.

    ``render(document, **options)`` takes the report document (plain JSON types, any leaf may be
    null) and returns the whole output as text. It reads nothing else and raises ``KvprobeError``
    only for options that make no sense. Options that a format has no use for are ignored.
    """

    name: str
    summary: str
    render: Callable[..., str]
