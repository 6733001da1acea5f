"""What a table is made of: the two types that ``kvprobe.schema`` describes every table with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column. ``dtype`` is a numpy code; ``null`` the raw value that stands for unknown."""

    name: str
    dtype: str
    unit: str
    meaning: str
    null: int | None = None


@dataclass(frozen=True)
class Table:
    """One table. ``kernel`` tables are fixed records from a ring buffer of the same name.

    ``derived`` columns are not in the record: a reader fills them, a redacted capture stores them.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    kernel: bool = False
    derived: tuple[Column, ...] = ()

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """The columns of an analysis frame."""
        return self.columns + self.derived
