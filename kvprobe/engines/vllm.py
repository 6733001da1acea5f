"""vLLM's file-system tier (OffloadingConnector, TieringOffloadingSpec, tier type ``fs``).

One file holds one chunk of all layers and all tensor-parallel ranks::

    ROOT/MODEL_DIGEST_rRANK/HHH/HH_gGROUP/HASH.bin

DIGEST is 12 hex digits over the configuration that ``ROOT/MODEL_DIGEST/config.json`` holds; HASH
is the hash of the chunk's last block and starts with the five digits of its folders. A file is
written as ``HASH.bin_NUMBER.tmp`` and renamed. llm-d's file backend uses the same scheme.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprobe.adapter import Engine, KVPath
from kvprobe.model import EngineFacts, EngineSetting

_DIGEST_DIGITS = 12
_CHUNK = re.compile(
    r"[^/]+_[0-9a-f]{12}_r\d+/([0-9a-f]{3})/([0-9a-f]{2})_g\d+/"
    r"(\1\2[0-9a-f]{11,})\.bin(_[0-9A-Za-z]+\.tmp)?"
)
_CONFIG_BYTES = 1 << 20


def recognise(path: str) -> KVPath | None:
    """The hash in a chunk's file name, for final and temporary names; None for other files."""
    if not path.endswith((".bin", ".tmp")):
        return None
    match = _CHUNK.fullmatch("/".join(path.rsplit("/", 4)[-4:]))
    return KVPath(match[3], match[4] is not None) if match else None


def config_fields(
    model: str, tokens_per_block: int, blocks_per_file: int, tp: int, dtype: str
) -> dict[str, Any]:
    """The fields of ``config.json`` for a model with one KV group."""
    return {
        "model_name": model,
        "tokens_per_hash": tokens_per_block,
        "blocks_per_file": blocks_per_file,
        "tp_size": tp,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "dtype": dtype,
        "kv_cache_groups": [{"tokens_per_block": tokens_per_block, "layer_names": []}],
        "inference_engine": "vllm",
    }


def base_path(root: str, fields: Mapping[str, Any]) -> str:
    """``ROOT/MODEL_DIGEST``: where ``config.json`` is; chunks are in the same with ``_rRANK``."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{root}/{str(fields['model_name']).replace('/', '_')}_{digest}"


def chunk_path(base: str, key: str, rank: int = 0, group: int = 0) -> str:
    """The file of chunk ``key`` (lower-case hex) below ``base_path``."""
    return f"{base}_r{rank}/{key[:3]}/{key[3:5]}_g{group}/{key}.bin"


def facts(root: str) -> EngineFacts | None:
    """What the newest ``config.json`` below ``root`` and one chunk beside it tell, else None."""
    found = [path for path in Path(root).glob("*/config.json") if path.is_file()]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            with path.open("rb") as file:
                fields = json.loads(file.read(_CONFIG_BYTES))
            group_tokens = [group["tokens_per_block"] for group in fields["kv_cache_groups"]]
            per_block = int(group_tokens[0] if group_tokens else fields["tokens_per_hash"])
            unit_tokens = per_block * int(fields["blocks_per_file"])
            model = str(fields["model_name"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        unit_bytes = _unit_bytes(path.parent)
        return EngineFacts(
            name="vllm",
            model=model,
            unit_tokens=unit_tokens,
            unit_bytes=unit_bytes,
            bytes_per_token=unit_bytes // unit_tokens if unit_bytes and unit_tokens else None,
            reads_in_flight=1,
            root=root,
            prefetch=False,
        )
    return None


def _unit_bytes(base: Path) -> int | None:
    """Size of the first chunk found: all of a group are equal."""
    for rank in base.parent.glob(f"{base.name}_r*"):
        for path in rank.glob("*/*_g0/*.bin"):
            return path.stat().st_size or None
    return None


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in vLLM's words (0.22 to 0.33 read)."""
    if knob == "unit_bytes":
        return _translate_unit(value, engine)
    if knob == "bytes_in_flight":
        return EngineSetting(
            None,
            None,
            "vLLM 0.27 and later read the files of one request one after another on one thread; "
            "n_read_threads only helps across requests. A larger unit puts more bytes in flight. "
            "(0.22 to 0.26: n_read_threads of the fs tier, default 16)",
        )
    if knob == "prefetch_horizon":
        return EngineSetting(None, None, "vLLM restores when it schedules; it has no prefetch")
    return EngineSetting(None, None, f"vLLM has no setting for {knob}")


def _translate_unit(value: int, engine: EngineFacts) -> EngineSetting:
    where = (
        "kv_connector_extra_config of --kv-transfer-config, then restart; a multiple of the GPU "
        "block (or blocks_per_chunk = tokens / GPU block, 0.27 and later). Chunks stored with "
        "another size are not found again"
    )
    if engine.unit_tokens and engine.unit_bytes:
        # The unit in use is a multiple of the GPU block, so a multiple of it is one too.
        tokens = engine.unit_tokens * max(1, round(value / engine.unit_bytes))
    elif engine.bytes_per_token:
        tokens = max(16, value // engine.bytes_per_token // 16 * 16)
    else:
        return EngineSetting("block_size", None, where + "; bytes a token are unknown")
    return EngineSetting("block_size", str(tokens), where)


ENGINE = Engine(
    name="vllm",
    summary="vLLM file-system tier and llm-d: one file a chunk, all layers and ranks",
    recognise=recognise,
    translate=translate,
    facts=facts,
)
