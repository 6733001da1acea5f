"""vLLM: its file-system tier, and what the server says of requests whoever keeps the files.

The tier (OffloadingConnector, TieringOffloadingSpec, tier type ``fs``; 0.22 and later) keeps one
file for a chunk of all layers and all tensor-parallel ranks::

    ROOT/MODEL_DIGEST_rRANK/HHH/HH_gGROUP/HASH.bin

DIGEST is 12 hex digits over the configuration that ``ROOT/MODEL_DIGEST/config.json`` holds; HASH
is the hash of the chunk's last block and starts with the five digits of its folders. A file is
written as ``HASH.bin_NUMBER.tmp`` and renamed. llm-d's file backend uses the same scheme now.

Two other connectors keep files: SimpleCPUOffloadConnector one of slots for each worker
(``NAME.rank_N``), ExampleConnector one for each layer of a prompt (``HASH/LAYER.safetensors``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvprobe.adapter import Engine, KVPath, Process, RunningEngine
from kvprobe.engines import _vllm_process
from kvprobe.engines._model_config import (
    is_latent,
    keeps_all_alike,
    rank_bytes_per_token,
    read_config,
)
from kvprobe.engines._options import integer
from kvprobe.engines._unit_setting import unit_setting
from kvprobe.engines._vllm_process import Server
from kvprobe.engines._vllm_signals import LOG_LINES, METRICS, read_span
from kvprobe.model import EngineFacts, EngineSetting

_DIGEST_DIGITS = 12
_CHUNK = re.compile(
    r"[^/]+_[0-9a-f]{12}_r\d+/([0-9a-f]{3})/([0-9a-f]{2})_g\d+/"
    r"(\1\2[0-9a-f]{11,})\.bin(_[0-9A-Za-z]+\.tmp)?"
)
_LAYER = re.compile(r"([0-9a-f]{32})/[^/]*\.layers\.\d+\.[^/]*attn[^/]*\.safetensors")
"""Weights are never one attention layer a file in a folder named by an MD5."""
_SLOTS = re.compile(
    r"(?!.*\.(?:log|txt|json|csv|pt|pth|pkl|pickle|ya?ml|gz|out|err)\.)[^/]+\.rank_\d+"
)
_CONFIG_BYTES = 1 << 20
_PAGE_BYTES = 4096


def recognise(path: str) -> KVPath | None:
    """The hash in a chunk's file name, for final and temporary names; None for other files."""
    if path.endswith((".bin", ".tmp")):
        match = _CHUNK.fullmatch("/".join(path.rsplit("/", 4)[-4:]))
        return KVPath(match[3], match[4] is not None) if match else None
    if path.endswith(".safetensors"):
        match = _LAYER.fullmatch("/".join(path.rsplit("/", 2)[-2:]))
        return KVPath(match[1]) if match else None
    name = path.rpartition("/")[2]
    return KVPath(name, shared=True) if ".rank_" in name and _SLOTS.fullmatch(name) else None


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
    return next((found for found, _ in _stored(root)), None)


def _stored(root: str) -> Iterator[tuple[EngineFacts, Mapping[str, Any]]]:
    """Facts of each configuration below ``root`` and its fields, the newest first."""
    found = [path for path in Path(root).glob("*/config.json") if path.is_file()]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            with path.open("rb") as file:
                fields = json.loads(file.read(_CONFIG_BYTES))
            group_tokens = [group["tokens_per_block"] for group in fields["kv_cache_groups"]]
            per_block = int(group_tokens[0] if group_tokens else fields["tokens_per_hash"])
            unit_tokens = per_block * int(fields["blocks_per_file"])
            model = str(fields["model_name"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        unit_bytes = _unit_bytes(path.parent)
        known = EngineFacts(
            name="vllm",
            model=model,
            unit_tokens=unit_tokens,
            unit_bytes=unit_bytes,
            bytes_per_token=unit_bytes // unit_tokens if unit_bytes and unit_tokens else None,
            reads_in_flight=1,
            root=root,
            prefetch=False,
        )
        yield known, fields


def _unit_bytes(base: Path) -> int | None:
    """Size of the first chunk found: all of a group are equal."""
    for rank in base.parent.glob(f"{base.name}_r*"):
        for path in rank.glob("*/*_g0/*.bin"):
            return path.stat().st_size or None
    return None


def detect(process: Process) -> RunningEngine | None:
    """The vLLM server that a process is, with the files that vLLM itself keeps.

    A connector of another project (LMCache, llm-d, Mooncake, KVBM) has an adapter of its own, which
    tells of the files; requests are told of here in any case.
    """
    server = _vllm_process.find_server(process)
    if server is None:
        return None
    roots = _vllm_process.storage_roots(server)
    return RunningEngine(
        engine="vllm",
        pid=process.pid,
        shape=_vllm_process.shape(server),
        roots=roots,
        signals=_vllm_process.signals(server),
        advice=_vllm_process.advice(server),
        facts=_running_facts(server, roots),
    )


def _running_facts(server: Server, roots: tuple[str, ...]) -> EngineFacts:
    """What is certain from options, the model's configuration, and what is stored already."""
    said = EngineFacts(
        "vllm",
        model=server.model,
        prefetch=False,
        prefill="cpu" if server.cpu_build else None,
        arithmetic=_vllm_process.arithmetic(server),
    )
    if not roots:
        return said
    said = replace(said, root=roots[0], reads_in_flight=_reads_in_flight(server))
    tokens = _chunk_tokens(server)
    for stored, fields in _stored(roots[0]):
        ranks = integer(fields.get("tp_size"))
        if (
            stored.model == server.model
            and tokens in (None, stored.unit_tokens)
            and ranks in (server.tensor_parallel, 1)
        ):
            return replace(
                stored,
                reads_in_flight=said.reads_in_flight,
                prefill=said.prefill,
                arithmetic=said.arithmetic,
            )
    return _with_sizes(replace(said, unit_tokens=tokens), server)


def _reads_in_flight(server: Server) -> int | None:
    """Files of one request that are read at once: 0.27 made the load of a request one task."""
    if server.version is None or server.version >= (0, 27):
        return 1
    threads = [integer(t.get("n_read_threads", 16)) for t in server.tiers if t.get("type") == "fs"]
    return threads[0] if threads else 1


def _chunk_tokens(server: Server) -> int | None:
    """Tokens of a unit; the GPU block's default depends on the platform and is not guessed."""
    extra = server.offloading_extra
    tokens = integer(extra.get("block_size"))
    if tokens is None and not server.context_parallel:
        block = server.options.number("block-size")
        tokens = block * (integer(extra.get("blocks_per_chunk")) or 1) if block else None
    return tokens if tokens is not None and tokens > 0 else None


def _with_sizes(said: EngineFacts, server: Server) -> EngineFacts:
    """Bytes of a token on all ranks and of a unit, as far as the model's configuration tells."""
    model, process = server.model, server.process
    config = read_config(model, process.environment, process.folder) if model else None
    ranks = server.tensor_parallel * server.pipeline_parallel
    if config is None or (ranks > 1 and is_latent(config)):
        return said  # whether equal ranks are stored once depends on the version
    rank = rank_bytes_per_token(
        config,
        dtype=server.options.text("dtype"),
        kv_dtype=server.options.text("kv-cache-dtype"),
        tensor_parallel=server.tensor_parallel,
        pipeline_parallel=server.pipeline_parallel,
    )
    if rank is None:
        return said
    unit = (said.unit_tokens or 0) * rank
    # Rows are rounded up to pages: of a rank or of all depends on the version.
    if not keeps_all_alike(config) or unit % _PAGE_BYTES:
        unit = 0
    if server.connector("SimpleCPUOffloadConnector") is None:
        unit *= ranks
    return replace(said, bytes_per_token=rank * ranks, unit_bytes=unit or None)


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in vLLM's words (0.22 to 0.33 read)."""
    if knob == "unit_bytes":
        return _translate_unit(value, engine)
    if knob == "bytes_in_flight" and (engine.reads_in_flight or 1) > 1 and engine.unit_bytes:
        where = "in the fs tier of secondary_tiers, then restart (0.22 to 0.26 only)"
        return EngineSetting("n_read_threads", str(max(1, value // engine.unit_bytes)), where)
    if knob == "bytes_in_flight":
        return EngineSetting(
            None,
            None,
            "vLLM 0.27 and later read the files of one request one after another on one thread; "
            "n_read_threads only helps across requests. A larger unit puts more bytes in flight. "
            "(0.22 to 0.26: n_read_threads of the fs tier, default 16)",
        )
    if knob == "prefetch_horizon":
        return EngineSetting(
            None, None, "vLLM (0.22 to 0.33) restores when it schedules; it has no prefetch"
        )
    return EngineSetting(None, None, f"vLLM has no setting for {knob}")


def _translate_unit(value: int, engine: EngineFacts) -> EngineSetting:
    where = (
        "kv_connector_extra_config of --kv-transfer-config, then restart; a multiple of the GPU "
        "block (or blocks_per_chunk = tokens / GPU block, 0.27 and later; the slots of "
        "SimpleCPUOffloadConnector are GPU blocks). Chunks of another size are not found again"
    )
    return unit_setting("block_size", where, value, engine, 16)


ENGINE = Engine(
    name="vllm",
    summary="vLLM: requests of every server; files of its fs tier, one a chunk of all ranks",
    recognise=recognise,
    translate=translate,
    facts=facts,
    detect=detect,
    log_lines=LOG_LINES,
    read_span=read_span,
    metrics=METRICS,
    publishes_kv_events=True,
)
