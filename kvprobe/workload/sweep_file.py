"""The file of a sweep: one JSON document that ``kvprobe sweep`` writes and tuners reason from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvprobe import __version__
from kvprobe.errors import KvprobeError
from kvprobe.model import DeviceFacts, ServiceCell

if TYPE_CHECKING:
    from kvprobe.workload.sweep import Sweep

FORMAT = "kvprobe-sweep"
VERSION = 1
MAX_BYTES = 8 << 20
"""A file may come from a stranger: a larger one is refused unread."""
_COUNTS = ("size_bytes", "depth", "n")
_RATES = ("low_bytes_per_s", "bytes_per_s", "high_bytes_per_s")
_HINT = "a sweep file is made by: kvprobe sweep DIR -o FILE"


def document(sweep: Sweep) -> dict[str, Any]:
    """A sweep as plain JSON types."""
    storage, plan = sweep.storage, sweep.plan
    return {
        "format": FORMAT,
        "version": VERSION,
        "kvprobe": __version__,
        "date": sweep.date,
        "device": asdict(storage.device) if storage.device else None,
        "filesystem": storage.filesystem,
        "direct": plan.direct,
        "fio": sweep.fio_version,
        "deep_engine": sweep.deep_engine,
        "file_bytes": plan.file_bytes,
        "seconds_per_cell": plan.seconds_per_cell,
        "repeats": sweep.repeats,
        "cells": [asdict(cell) for cell in sweep.cells],
    }


def read_sweep(path: str, devices: Sequence[DeviceFacts] = ()) -> tuple[ServiceCell, ...]:
    """The cells of a sweep file.

    Args:
        path: the file.
        devices: those that the sweep must have measured one of, by transport and size (names
            change); none: any.

    Raises:
        KvprobeError: unreadable, too large, not a sweep, of a later version, of none of the
            devices, or a cell that makes no sense.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise KvprobeError(f"{path} is too large for a sweep", _HINT)
            found = json.loads(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise KvprobeError(f"cannot read sweep {path}: {error.strerror}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise KvprobeError(f"sweep {path} is no JSON", _HINT) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise KvprobeError(f"{path} is not a sweep", _HINT)
    if found.get("version") != VERSION:
        raise KvprobeError(
            f"sweep {path} has version {str(found.get('version'))[:20]}, known is {VERSION}",
            "use the kvprobe that made it, or a later one",
        )
    _ensure_one_of(found.get("device"), devices, path)
    cells = found.get("cells")
    if not isinstance(cells, list) or not cells:
        raise KvprobeError(f"sweep {path} has no cells", _HINT)
    return tuple(_cell(cell, f"cell {place} of sweep {path}") for place, cell in enumerate(cells))


def _ensure_one_of(swept: Any, devices: Sequence[DeviceFacts], path: str) -> None:
    """A sweep of other storage says nothing about this one; unknown storage passes."""
    if not isinstance(swept, dict) or not swept.get("size_bytes"):
        return
    known = [facts for facts in devices if facts.size_bytes]
    measured = swept.get("transport"), swept["size_bytes"]
    if known and measured not in [(facts.transport, facts.size_bytes) for facts in known]:
        raise KvprobeError(
            f"sweep {path} measured {str(swept.get('name'))[:40]}, no device of this capture",
            "sweep the storage that was captured: kvprobe sweep DIR -o FILE",
        )


def _cell(cell: Any, where: str) -> ServiceCell:
    hint = "measure again with `kvprobe sweep`"
    if not isinstance(cell, dict):
        raise KvprobeError(f"{where} is no cell", hint)
    for name in _COUNTS:
        if type(cell.get(name)) is not int or not 0 < cell[name] < 1 << 53:
            raise KvprobeError(f"no {name} in {where}", hint)
    for name in _RATES:
        if type(cell.get(name)) not in (int, float) or not 0 < cell[name] < math.inf:
            raise KvprobeError(f"no {name} in {where}", hint)
    low, mid, high = (float(cell[name]) for name in _RATES)
    if not isinstance(cell.get("direct"), bool):
        raise KvprobeError(f"no direct in {where}", hint)
    if not low <= mid <= high:
        raise KvprobeError(f"the interval of {where} does not hold its middle", hint)
    return ServiceCell(
        cell["size_bytes"], cell["depth"], cell["direct"], mid, low, high, cell["n"], "sweep"
    )
