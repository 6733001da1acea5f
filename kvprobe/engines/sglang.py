"""SGLang's HiCache: its ``file`` and ``nixl`` storage backends.

===========  ====================================================================================
``file``     ``HASH[.POOL]_MODEL[_RANK_RANKS][_..].bin``: a page of a rank; ranks share that of a
             latent cache (MLA). Written as ``.UUID.tmp`` beside it and renamed; 0.5.15 to 0.5.19
             as ``HASH_..bin.tmp..``; before in place
``nixl``     ``XX/HASH_MODEL[_RANK_RANKS][_k|_v|_POOL]``, written in place
===========  ====================================================================================

HASH is 64 hex digits, of the page and all before it. ``hf3fs`` keeps one file a rank behind shared
memory, ``mooncake`` has an adapter of its own.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from kvprobe.adapter import Engine, KVPath
from kvprobe.engines._sglang_process import NAME, detect
from kvprobe.engines._sglang_signals import (
    LOG_LINES,
    METRICS,
    REQUEST_FILES,
    read_span,
)
from kvprobe.engines._unit_setting import unit_setting
from kvprobe.model import EngineFacts, EngineSetting

_NAME_MAX = 255
_FILES_LOOKED_AT = 1000
_DIGITS = 64
_FILE = re.compile(r"([0-9a-f]{64})(?:\.\w+)?_[^/]+\.bin(\.tmp(?:\.[\w.-]+)?)?")
_UNNAMED = re.compile(r"\.([0-9a-f]{32})\.tmp")
_NIXL = re.compile(r"([0-9a-f]{64})_[^/]+")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_OTHERS = (".bin", ".data", ".json", ".meta", ".metadata", ".pt", ".safetensors", ".tmp")


def recognise(path: str) -> KVPath | None:
    """The page's hash; of a new file that has no name yet its number. None for other files."""
    folder, _, name = path.rpartition("/")
    if len(name) > _NAME_MAX:
        return None
    if name[:1] == ".":
        unnamed = _UNNAMED.fullmatch(name)
        return KVPath(unnamed[1], temporary=True) if unnamed else None
    if name[_DIGITS : _DIGITS + 1] not in ("_", "."):
        return None
    match = _FILE.fullmatch(name)
    if match:
        return KVPath(match[1], match[2] is not None)
    if name.endswith(_OTHERS) or not _FOLDER.fullmatch(folder.rpartition("/")[2]):
        return None
    match = _NIXL.fullmatch(name)
    return KVPath(match[1]) if match else None


def facts(root: str) -> EngineFacts | None:
    """The size of a rank's page by the files of the ``file`` backend below ``root``."""
    try:
        with os.scandir(root) as entries:
            for entry in islice(entries, _FILES_LOOKED_AT):
                page = entry.name.endswith(".bin") and entry.name[_DIGITS : _DIGITS + 1] == "_"
                if page and recognise(str(Path(root, entry.name))) and entry.stat().st_size:
                    size = entry.stat().st_size
                    return EngineFacts(
                        NAME,
                        unit_bytes=size,
                        reads_in_flight=1,
                        direct=False,
                        root=root,
                        prefetch=True,
                    )
    except OSError:
        pass
    return None


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in SGLang's words (0.5.9 to 0.5.23 read)."""
    if knob == "unit_bytes":
        return _translate_unit(value, engine)
    if knob == "bytes_in_flight":
        return EngineSetting(
            None,
            None,
            "SGLang has no such setting up to 0.5.23: the file backend reads page after page on "
            "one thread, nixl has up to 128 pages of a request in flight, both fixed. A larger "
            "--page-size puts more bytes in flight, and so does changing file for nixl "
            "(--hicache-storage-backend, or PUT /hicache/storage-backend while nothing runs)",
        )
    if knob == "prefetch_horizon":
        return EngineSetting(
            "--hicache-storage-prefetch-policy",
            "timeout" if value > 0 else "best_effort",
            "SGLang starts to restore when a request enters its queue; the policy says how long "
            "it then waits for that (best_effort: not at all, the default up to 0.5.9; timeout: "
            "the default since 0.5.12; wait_complete). prefetch_timeout_base 1 s, "
            "prefetch_timeout_per_ki_token 0.25 s and prefetch_threshold 256 tokens are in "
            "--hicache-storage-backend-extra-config. Without a restart: PUT "
            "/hicache/storage-backend with hicache_storage_prefetch_policy and "
            "hicache_storage_backend_extra_config_json, while nothing runs",
            live=True,
        )
    return EngineSetting(None, None, f"SGLang has no setting for {knob}")


def _translate_unit(value: int, engine: EngineFacts) -> EngineSetting:
    how = (
        "tokens of a page, then restart; some attention backends fix it. Pages stored with another "
        "size are not found again"
    )
    return unit_setting("--page-size", how, value, engine, 1)


ENGINE = Engine(
    name=NAME,
    summary="SGLang HiCache, file and nixl storage: one file a page and rank",
    recognise=recognise,
    translate=translate,
    facts=facts,
    detect=detect,
    log_lines=LOG_LINES,
    read_span=read_span,
    metrics=METRICS,
    json_files=(REQUEST_FILES,),
    publishes_kv_events=True,
)
