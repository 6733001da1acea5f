"""LMCache, in an engine's own processes and as a server beside it (``lmcache server``)."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from kvprobe.adapter import Engine
from kvprobe.engines._lmcache_paths import recognise
from kvprobe.engines._lmcache_processes import NAME, detect
from kvprobe.engines._lmcache_signals import LOG_LINES, LOOKUP_FILES, METRICS, read_span
from kvprobe.engines._unit_setting import unit_setting
from kvprobe.model import EngineFacts, EngineSetting

_FILES_LOOKED_AT = 1000
_LEAST_TOKENS = 16
"""A chunk is whole blocks of the engine, whose smallest usual block is this."""


def facts(root: str) -> EngineFacts | None:
    """The size of a rank's chunk by the files right below ``root``; of full chunks, the largest."""
    largest = 0
    try:
        with os.scandir(root) as entries:
            for entry in islice(entries, _FILES_LOOKED_AT):
                known = recognise(str(Path(root, entry.name)))
                if known and not known.temporary and not known.shared and entry.is_file():
                    largest = max(largest, entry.stat().st_size)
    except OSError:
        return None
    return EngineFacts(name=NAME, unit_bytes=largest, root=root) if largest else None


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in LMCache's words (0.3.1 to 0.5.6 read)."""
    if knob == "unit_bytes":
        return _translate_unit(value, engine)
    if knob == "bytes_in_flight":
        return _translate_depth(value, engine)
    if knob == "prefetch_horizon":
        return EngineSetting(
            None,
            None,
            "LMCache begins to restore when the engine's scheduler first looks at a request, not "
            "before. The server (0.5.0 and later) restores for --l2-prefetch-max-in-flight "
            "requests at once (default 8); in-process enable_async_loading: true lets a restore "
            "overlap other requests' steps",
        )
    return EngineSetting(None, None, f"LMCache has no setting for {knob}")


def _translate_unit(value: int, engine: EngineFacts) -> EngineSetting:
    how = (
        "option of lmcache server; in-process chunk_size (LMCACHE_CHUNK_SIZE); default 256 tokens; "
        "then restart. Whole blocks of the engine. Chunks stored with another size are not found "
        "again"
    )
    return unit_setting("--chunk-size", how, value, engine, _LEAST_TOKENS)


def _translate_depth(value: int, engine: EngineFacts) -> EngineSetting:
    """Reads in flight are files in flight: a worker reads one file at a time."""
    files = max(1, value // engine.unit_bytes) if engine.unit_bytes else None
    return EngineSetting(
        "num_workers",
        None if files is None else str(files),
        "of the fs_native adapter in --l2-adapter of lmcache server (default 4), then restart. "
        "The fs adapter has no such setting up to 0.5.6: it reads one file of a request at a time, "
        "fs_native reads the same files. raw_block: num_load_workers (default 4), or io_engine "
        "io_uring with iouring_queue_depth (default 256). nixl_store_dynamic reads all at once. "
        "In-process local_disk and GDS: disk_io_threads in extra_config (default 4, since 0.5.1; "
        "before that one at a time)",
    )


ENGINE = Engine(
    name=NAME,
    summary="LMCache in-process and server: one file a chunk and rank, request keys exact",
    recognise=recognise,
    translate=translate,
    facts=facts,
    detect=detect,
    log_lines=LOG_LINES,
    read_span=read_span,
    metrics=METRICS,
    json_files=(LOOKUP_FILES,),
)
