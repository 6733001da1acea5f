"""The derived columns of ``lookups``: which paths are KV cache, by the engine's own rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvprobe.adapter import KVPath
from kvprobe.capture.frames import object_array
from kvprobe.model import Frame
from kvprobe.schema import UNKNOWN

Recogniser = Callable[[str], KVPath | None]


def recogniser(engine_name: str | None) -> Recogniser:
    """The path rule of one engine; of all engines where none is named or it is not known here."""
    from kvprobe import engines

    known = engines.engines().get(engine_name) if engine_name else None
    return known.recognise if known else engines.recognise


def fill_keys(frame: Frame, engine_name: str | None) -> None:
    """Set the derived columns of a ``lookups`` frame from its paths."""
    recognise = recogniser(engine_name)
    known: dict[str | None, KVPath | None] = {None: None}
    found = []
    for path in frame["path"]:
        if path not in known:
            known[path] = recognise(path)
        found.append(known[path])
    frame["kv_key"] = object_array([None if kv is None else kv.key for kv in found])
    for column in ("temporary", "shared"):
        frame[f"kv_{column}"] = np.array(
            [UNKNOWN if kv is None else int(getattr(kv, column)) for kv in found], dtype=np.int64
        )
