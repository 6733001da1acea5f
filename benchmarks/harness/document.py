"""The outcome of a benchmark: facts of the machine, tables, aims, notes; as JSON and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvprobe.model import Interval

SCHEMA_VERSION = 1

Value: TypeAlias = str | int | float | bool | Interval | None


@dataclass(frozen=True)
class Column:
    """One column of a table: its key in each row, its heading, how a number is written.

    ``form`` is a format specification; for an interval it is used for each of its three numbers.
    """

    key: str
    heading: str
    form: str = ""
    scale: float = 1.0


@dataclass(frozen=True)
class Table:
    """Rows of values by column key; a missing or None value is unknown."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]


@dataclass(frozen=True)
class Aim:
    """What was to be reached, what was measured; ``met`` None where it could not be measured."""

    what: str
    measured: str
    met: bool | None


@dataclass
class Outcome:
    """What a benchmark found out; ``settings`` are the choices that a repeat has to make again."""

    settings: dict[str, Value] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def as_json(name: str, machine: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values; intervals become mappings, what is no number becomes null."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": name,
        "machine": machine,
        "settings": outcome.settings,
        "tables": [
            {
                "title": table.title,
                "rows": [{c.key: row.get(c.key) for c in table.columns} for row in table.rows],
            }
            for table in outcome.tables
        ],
        "aims": [asdict(aim) for aim in outcome.aims],
        "notes": outcome.notes,
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def as_text(name: str, machine: Mapping[str, Any], outcome: Outcome) -> str:
    """The outcome for a reader."""
    lines = [f"benchmark {name}", ""]
    lines += [f"{key:<9} {value}" for key, value in _said(machine)]
    lines += [f"{key:<9} {value}" for key, value in _said(outcome.settings)]
    for table in outcome.tables:
        lines += ["", table.title, *_grid(table)]
    if outcome.aims:
        lines += ["", "aims"]
        words = {True: "met", False: "MISSED", None: "unknown"}
        lines += [f"  {words[aim.met]:<8} {aim.what}: {aim.measured}" for aim in outcome.aims]
    if outcome.notes:
        lines += ["", "notes", *(f"  - {note}" for note in outcome.notes)]
    return "\n".join(lines) + "\n"


def save(folder: Path, name: str, document: Mapping[str, Any], text: str) -> None:
    """Write NAME.json and NAME.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    (folder / f"{name}.txt").write_text(text)


def _said(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{inner} {said}" for inner, said in value.items())
        lines.append((key, str(value)))
    return lines


def _grid(table: Table) -> list[str]:
    cells = [[c.heading for c in table.columns]]
    cells += [[_cell(row.get(c.key), c) for c in table.columns] for row in table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    return [
        "  " + "  ".join(_aligned(i, cell, widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in cells
    ]


def _aligned(index: int, cell: str, width: int) -> str:
    return cell.ljust(width) if index == 0 else cell.rjust(width)


def _cell(value: Value, column: Column) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, Interval):
        if not value.n:
            return "-"
        mid, low, high = (_number(part, column) for part in (value.mid, value.low, value.high))
        return f"{mid} [{low}, {high}]"
    if isinstance(value, str | bool):
        return str(value)
    return _number(value, column)


def _number(value: float, column: Column) -> str:
    return format(value if column.scale == 1 else value * column.scale, column.form)


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
