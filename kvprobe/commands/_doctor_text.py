"""How ``kvprobe doctor`` prints: one line a feature, wrapped to the terminal, the fix below it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from kvprobe.bpf.features import Feature, State
from kvprobe.commands._chain_text import chain_lines
from kvprobe.commands._terminal import Style
from kvprobe.sources.topology import Layer


def sign_of(feature: Feature) -> str:
    """``good``, ``less`` (a capture shows less), ``bad`` (it stops a capture) or ``unknown``."""
    if feature.stops_capture:
        return "bad"
    return {State.OK: "good", State.UNKNOWN: "unknown"}.get(feature.state, "less")


def lines(
    features: Sequence[Feature], summary: str, style: Style, chain: Layer | None = None
) -> Iterator[str]:
    """The whole text; only a fix and the tree of the chain may be longer than the width."""
    name_width = max((len(feature.name) for feature in features), default=0)
    indent = " " * (name_width + 6)
    for group, members in groupby(features, key=lambda feature: feature.group):
        yield style.bold(group)
        for feature in members:
            text = f"{feature.why}: {feature.effect}" if feature.effect else feature.why
            first, *more = _wrapped(text, style.width - len(indent)) or [""]
            yield f"  {style.sign(sign_of(feature))} {feature.name:{name_width}}  {first}"
            yield from (indent + line for line in more)
            if feature.fix:
                yield f"{indent}fix: {feature.fix}"
        yield ""
    if chain is not None:
        yield style.bold("from the path to the queues")
        yield from (f"  {line}" for line in chain_lines(chain, style))
        yield ""
    yield from _wrapped(summary, style.width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
