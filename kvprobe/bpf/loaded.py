"""What a loader hands over: descriptors of programs and maps, nothing of its own state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What to load: the same for every loader.

    Args:
        programs: names of the programs to load.
        constants: value per (kind, name) of ``compose.Source.constants``.
        entries: map name -> entries, for maps that differ from their declaration; for a ring
            buffer its size in bytes.
    """

    programs: frozenset[str]
    constants: Mapping[tuple[str, str], int]
    entries: Mapping[str, int]


@dataclass(frozen=True)
class Loaded:
    """Loaded programs and maps by name. The holder closes it; programs live until detached too."""

    loader: str
    programs: Mapping[str, int]
    maps: Mapping[str, int]

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in (*self.programs.values(), *self.maps.values()):
            os.close(descriptor)
