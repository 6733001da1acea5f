"""llm-d's file backend for vLLM (SharedStorageOffloadingSpec): one file a chunk and rank.

Its files have the names of vLLM's fs tier now, with the true rank in ``_rRANK``: they cannot be
told apart by name, and ``vllm`` claims them. Before, they were::

    ROOT/MODEL/block_size_N_blocks_per_file_N/tp_N_pp_size_N_pcp_size_N/rank_N/DTYPE/HHH/HH/HASH.bin

Workers read and write them, buffered, a thread a file. A transfer's own log line names a job, no
request; what vLLM says of requests is read by ``vllm``. The backend ended with vLLM 0.22.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from kvprobe.adapter import Engine, KVPath, Process, RunningEngine
from kvprobe.engines import vllm
from kvprobe.engines._model_config import rank_bytes_per_token, read_config
from kvprobe.engines._options import integer, words
from kvprobe.engines._vllm_process import Server, arithmetic, find_server
from kvprobe.model import EngineFacts, EngineSetting

_CHUNK = re.compile(
    r"block_size_\d+_blocks_per_file_\d+/tp_\d+_pp_size_\d+_pcp_size_\d+/rank_\d+/[^/]+/"
    r"([0-9a-f]{3})/([0-9a-f]{2})/(\1\2[0-9a-f]{11,})\.bin((?:_[0-9A-Za-z]+)?\.tmp)?"
)
_DEFAULT_ROOT = "/tmp/shared-kv"
_DEFAULT_TOKENS = 256
_DEFAULT_THREADS = 64


def recognise(path: str) -> KVPath | None:
    """The hash in the file name of a chunk in the former layout; None for other files."""
    if not path.endswith((".bin", ".tmp")) or "/rank_" not in path:
        return None
    match = _CHUNK.fullmatch("/".join(path.rsplit("/", 7)[-7:]))
    return KVPath(match[3], match[4] is not None) if match else None


def detect(process: Process) -> RunningEngine | None:
    """llm-d's files of a vLLM server; the server itself is found by ``vllm``."""
    server = find_server(process)
    backend = next((c for c in server.connectors if c.is_llmd), None) if server else None
    if server is None or backend is None or backend.extra.get("backend", "POSIX") != "POSIX":
        return None
    extra = backend.extra
    root = words(extra.get("shared_storage_path")) or _DEFAULT_ROOT
    root = os.path.normpath(os.path.join(process.folder or "/", root))
    tokens = integer(extra.get("block_size", _DEFAULT_TOKENS))
    threads = integer(extra.get("threads_per_gpu", _DEFAULT_THREADS))
    known = EngineFacts(
        "llmd",
        model=server.model,
        unit_tokens=tokens,
        reads_in_flight=threads,
        direct=False,
        root=root,
        prefetch=False,
        arithmetic=arithmetic(server),
    )
    return RunningEngine(
        engine="llmd",
        pid=process.pid,
        shape=f"{tokens or '?'} tokens a file, {threads or '?'} threads a GPU",
        roots=(root,),
        facts=_with_sizes(known, server),
    )


def _with_sizes(known: EngineFacts, server: Server) -> EngineFacts:
    """Bytes of a token on all ranks, and of a file, which is one rank's."""
    process, ranks = server.process, server.tensor_parallel * server.pipeline_parallel
    config = (
        read_config(server.model, process.environment, process.folder) if server.model else None
    )
    rank = config and rank_bytes_per_token(
        config,
        dtype=server.options.text("dtype"),
        kv_dtype=server.options.text("kv-cache-dtype"),
        tensor_parallel=server.tensor_parallel,
        pipeline_parallel=server.pipeline_parallel,
    )
    if not rank or not known.unit_tokens:
        return known
    return replace(known, bytes_per_token=rank * ranks, unit_bytes=rank * known.unit_tokens)


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in llm-d's words (0.8 read); all need a restart of vLLM."""
    where = "kv_connector_extra_config of --kv-transfer-config, then restart"
    if knob == "unit_bytes":
        said = vllm.translate(knob, value, engine)
        rule = "; a multiple of the GPU block. Chunks of another size are not found again"
        return replace(said, how=where + rule)
    if knob == "bytes_in_flight":
        if not engine.unit_bytes:
            return EngineSetting("threads_per_gpu", None, where + "; bytes of a file are unknown")
        threads = str(max(1, value // engine.unit_bytes))
        share = "; read_preferring_ratio of them (0.75) take reads first"
        return EngineSetting("threads_per_gpu", threads, where + share)
    if knob == "prefetch_horizon":
        return EngineSetting(
            None, None, "vLLM restores when it schedules; llm-d (0.8) has no prefetch"
        )
    return EngineSetting(None, None, f"llm-d has no setting for {knob}")


ENGINE = Engine(
    name="llmd",
    summary="llm-d's file backend for vLLM: one file a chunk and rank",
    recognise=recognise,
    translate=translate,
    detect=detect,
)
