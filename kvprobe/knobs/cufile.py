"""GPUDirect Storage: ``cufile.json``, read by an engine when it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

_STRING_OR_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_ELSEWHERE = "a process that has CUFILE_ENV_PATH_JSON reads another file"


def _knob(
    name: str, family: Family, unit: str, meaning: str, default: str = "", allowed: str = ""
) -> Knob:
    return Knob(
        name,
        family,
        unit,
        meaning,
        Reach.ENGINE_RESTART,
        default,
        allowed,
        ignored=_ELSEWHERE,
        risk="memory that is pinned for each process",
    )


_KNOBS = (
    _knob(
        "properties.max_direct_io_size_kb",
        Family.BLOCK_SIZE,
        "KiB",
        "the largest piece of a transfer that goes to the driver at once",
        default="16384",
        allowed="multiples of 64",
    ),
    _knob(
        "properties.per_buffer_cache_size_kb",
        Family.BLOCK_SIZE,
        "KiB",
        "bounce buffer of each transfer that cannot go directly",
        default="1024",
    ),
    _knob(
        "properties.use_pci_p2pdma",
        Family.BLOCK_SIZE,
        "",
        "transfers of NVMe go by peer-to-peer DMA of the kernel, without nvidia-fs",
        default="False",
    ),
    _knob(
        "properties.max_device_cache_size_kb",
        Family.QUEUE_DEPTH,
        "KiB",
        "all bounce buffers of a GPU together",
        default="131072",
    ),
    _knob(
        "properties.io_batchsize",
        Family.QUEUE_DEPTH,
        "requests",
        "the largest batch",
        default="128",
    ),
    _knob(
        "execution.max_io_queue_depth",
        Family.QUEUE_DEPTH,
        "requests",
        "requests waiting for the worker threads",
        default="128",
    ),
    _knob(
        "execution.max_io_threads",
        Family.QUEUE_DEPTH,
        "threads",
        "worker threads that do I/O for one process",
        default="4",
    ),
    _knob(
        "execution.max_request_parallelism",
        Family.QUEUE_DEPTH,
        "pieces",
        "pieces of one transfer done at one time",
        default="4",
    ),
    _knob(
        "execution.min_io_threshold_size_kb",
        Family.BLOCK_SIZE,
        "KiB",
        "transfers shorter than this are done in one piece",
        default="8192",
    ),
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    source = subjects.roots.etc / "cufile.json"
    sections = _sections(source)
    if not subjects.host or not sections:
        return
    for knob in KIND.knobs:
        section, _, name = knob.name.partition(".")
        value = sections.get(section, {}).get(name)
        if isinstance(value, bool | int | float | str):
            yield setting(knob, "host", str(value), source)


def _sections(source: Path) -> dict[str, dict[str, object]]:
    """The file's sections; it is JSON with comments. None where it is not."""
    text = _STRING_OR_COMMENT.sub(lambda found: found[1] or "", read_text(source) or "")
    try:
        value = json.loads(_TRAILING_COMMA.sub(r"\1", text))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: part for name, part in value.items() if isinstance(part, dict)}


KIND = KnobKind("cufile", "GPUDirect Storage", _KNOBS, _read)
