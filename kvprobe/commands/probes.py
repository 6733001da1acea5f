"""``kvprobe probes``: every probe, its table, and which of its events exist here."""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvprobe.commands import Command
from kvprobe.errors import ExitCode

if TYPE_CHECKING:
    from kvprobe.bpf.readiness import ProbeState
    from kvprobe.commands._terminal import Style

SCHEMA_VERSION = 1
_INDENT = "  "


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _run(options: Namespace) -> int:
    from kvprobe.bpf.btf import Btf
    from kvprobe.bpf.readiness import probe_states
    from kvprobe.commands._terminal import Style

    states = probe_states(Btf.load())
    if options.json:
        listed = [_as_json(state) for state in states]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "probes": listed}))
    else:
        style = Style.of(sys.stdout)
        print("\n\n".join("\n".join(_lines(state, style)) for state in states))
    return ExitCode.OK


def _as_json(state: ProbeState) -> dict[str, Any]:
    probe = state.probe
    return {
        "name": probe.name,
        "summary": probe.summary,
        "table": probe.table,
        "ring_bytes": probe.ring_bytes,
        "events": [
            {
                "event": hook.label,
                "program": hook.name,
                "exists": None if state.is_idle(hook) else exists,
            }
            for hook, exists in state.hooks
        ],
        "functions": [{"function": name, "exists": exists} for name, exists in state.symbols],
        "hides": {name: probe.hides.get(name, "") for name in _missing(state)},
        "no_purpose": state.no_purpose,
        "notes": list(probe.notes),
    }


def _missing(state: ProbeState) -> tuple[str, ...]:
    """What this kernel lacks; nothing of a probe whose module is not loaded."""
    return state.missing if state.has_purpose else ()


def _lines(state: ProbeState, style: Style) -> Iterator[str]:
    probe = state.probe
    yield from textwrap.wrap(f"{style.bold(probe.name)}: {probe.summary}", style.width)
    yield f"{_INDENT}table {probe.table}, ring buffer {probe.ring_bytes >> 20} MiB"
    yield from _paragraph(state.no_purpose, style)
    meanings = {True: "good", False: "less", None: "unknown"}
    signed = []
    for hook, exists in state.hooks:
        unused = state.is_idle(hook) or (exists is False and hook.event in probe.optional)
        signed.append((hook.label, "unused" if unused else meanings[exists]))
    yield from _signed(signed, style)
    yield from _signed([(name, meanings[exists]) for name, exists in state.symbols], style)
    for name in _missing(state):
        text = f"without {name} not seen: {probe.hides[name]}" if name in probe.hides else ""
        yield from _paragraph(text, style)
    for note in probe.notes:
        yield from _paragraph(f"note: {note}", style)


def _signed(names: list[tuple[str, str]], style: Style) -> Iterator[str]:
    """Names in columns, each with a sign for whether it exists."""
    if not names:
        return
    cell = max(len(name) for name, _ in names) + 4
    columns = max(1, (style.width - len(_INDENT)) // cell)
    for start in range(0, len(names), columns):
        row = names[start : start + columns]
        cells = [f"{style.sign(meaning)} {name:{cell - 4}}" for name, meaning in row]
        yield (_INDENT + "  ".join(cells)).rstrip()


def _paragraph(text: str, style: Style) -> list[str]:
    return textwrap.wrap(
        text, style.width, initial_indent=_INDENT, subsequent_indent=_INDENT + "  "
    )


COMMAND = Command(
    "probes", "list the probes and which of their events exist here", _configure, _run
)
