"""Which processes are SGLang servers, and how they are set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprobe.adapter import Process, RunningEngine, SignalPlace
from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines._model_arithmetic import model_arithmetic
from kvprobe.engines._model_config import is_latent, rank_bytes_per_token, read_config
from kvprobe.engines._options import (
    Options,
    address,
    json_object,
    own_port,
    switched_on,
    words,
)
from kvprobe.model import EngineFacts

NAME = "sglang"
_PORT = 30000
_GRPC_PORT = 4317
_CONFIG_BYTES = 1 << 18
_MORE_THAN_THE_MODEL = (
    "config",
    "enable-dp-attention",
    "enable-lora",
    "json-model-override-args",
    "lora-paths",
    "speculative-algorithm",
)
"""Options with which a prefill computes what the model's configuration does not tell."""
_DIRECT = "SGLANG_HICACHE_NIXL_USE_DIRECT_IO"


def detect(process: Process) -> RunningEngine | None:
    """An SGLang server; its own children are named ``sglang::``."""
    options = Options(process.arguments)
    if process.name.startswith("sglang::") or not _is_server(options):
        return None
    backend = options.text("hicache-storage-backend")
    roots = _roots(process, options, backend)
    page, model = options.number("page-size"), options.text("model-path", "model")
    rank_bytes, copies = _bytes_a_token(process, options, model)
    is_file = backend == "file"
    direct = None
    if backend == "nixl":
        direct = _DIRECT not in process.environment or switched_on(process.environment, _DIRECT)
    return RunningEngine(
        engine=NAME,
        pid=process.pid,
        shape=_shape(options, backend, page),
        roots=roots,
        signals=_signals(process, options, backend),
        advice=_advice(process, options, backend),
        facts=EngineFacts(
            name=NAME,
            model=model,
            unit_tokens=page,
            unit_bytes=page * rank_bytes if page and rank_bytes and is_file else None,
            bytes_per_token=rank_bytes * copies if rank_bytes else None,
            reads_in_flight=1 if is_file else None,
            direct=False if is_file else direct,
            root=roots[0] if roots else None,
            prefetch=True if backend else None,
            arithmetic=_arithmetic(process, options, model),
        ),
    )


def _is_server(options: Options) -> bool:
    programs = [os.path.basename(word) for word in options.rest[:3]]
    if not programs or not programs[0].startswith(("python", "sglang")):
        return False  # a shell or a container's client that has the same words
    place = programs.index("sglang") if "sglang" in programs else -1
    serves = place >= 0 and programs[place + 1 : place + 2] == ["serve"]
    return serves or options.text("m") == "sglang.launch_server"


def _shape(options: Options, backend: str | None, page: int | None) -> str:
    parts = [f"pages of {page} tokens"] if page else []
    tensor = _ranks(options)[0]
    parts += [f"TP {tensor}"] if tensor > 1 else []
    if backend:
        parts.append(f"HiCache with {backend} storage")
        policy = options.text("hicache-storage-prefetch-policy")
        parts += [f"prefetch {policy}"] if policy else []
    elif options.has("enable-hierarchical-cache"):
        parts.append("HiCache in host memory")
    else:
        parts.append("no HiCache")
    return ", ".join(parts)


def _roots(process: Process, options: Options, backend: str | None) -> tuple[str, ...]:
    environment, extra = process.environment, _extra(process, options)
    if backend == "file":
        named = environment.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
        named = named or words(extra.get("file_storage_path"))
        texts = [named or options.text("file-storage-path") or "/tmp/hicache"]
    elif backend == "nixl":
        named = environment.get("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR")
        texts = (named or "/tmp/hicache_storage").split(",")
    else:
        return ()
    found = [os.path.join(process.folder or "/", text.strip()) for text in texts if text.strip()]
    return tuple(dict.fromkeys(map(os.path.normpath, found)))


def _extra(process: Process, options: Options) -> Mapping[str, Any]:
    """``--hicache-storage-backend-extra-config``: JSON, or a file of it behind ``@``."""
    text = options.text("hicache-storage-backend-extra-config") or ""
    if text.startswith("@"):
        try:
            with Path(process.folder or "/", text[1:]).open("rb") as file:
                text = file.read(_CONFIG_BYTES).decode("utf-8", "replace")
        except OSError:
            return {}
    return json_object(text)


def _signals(process: Process, options: Options, backend: str | None) -> tuple[SignalPlace, ...]:
    places = []
    folder = options.text("export-metrics-to-file-dir")
    if options.has("export-metrics-to-file") and folder:
        path = os.path.normpath(os.path.join(process.folder or "/", folder))
        places.append(SignalPlace("files", path))
    if options.has("enable-metrics"):
        host = address(options.text("host"), options.number("port") or _PORT)
        places.append(SignalPlace("metrics", f"http://{host}/metrics"))
    if options.has("enable-trace"):
        endpoint = options.text("otlp-traces-endpoint") or f"localhost:{_GRPC_PORT}"
        port = own_port(endpoint, _GRPC_PORT)
        places += [SignalPlace("otlp", str(port))] if port else []
    if process.log and backend:
        places.append(SignalPlace("log", process.log))
    return tuple(places)


def _advice(process: Process, options: Options, backend: str | None) -> tuple[str, ...]:
    if options.has("config"):
        return ()  # options may be in that file
    said = []
    if not (options.has("export-metrics-to-file") and options.has("enable-metrics")):
        said.append(
            "add --enable-metrics --export-metrics-to-file --export-metrics-to-file-dir DIR: when "
            "each request was prefilled and what it found in which tier (the files hold prompts)"
        )
    if backend and not process.log:
        said.append(
            "send its output to a file, or name its journal unit (journal:UNIT): its log tells how "
            "many tokens each request had from storage"
        )
    return tuple(said)


def _ranks(options: Options) -> tuple[int, int]:
    """Ranks that share the heads, ranks that share the layers."""
    return (
        options.number("tensor-parallel-size", "tp-size", "tp") or 1,
        options.number("pipeline-parallel-size", "pp-size", "pp") or 1,
    )


def _bytes_a_token(process: Process, options: Options, model: str | None) -> tuple[int | None, int]:
    """Bytes that a rank keeps of a token, and how many ranks store their own."""
    config = read_config(model, process.environment, process.folder) if model else None
    if config is None or options.has("enable-dp-attention"):
        return None, 1
    tensor, pipeline = _ranks(options)
    found = rank_bytes_per_token(
        config,
        dtype=options.text("dtype"),
        kv_dtype=options.text("kv-cache-dtype"),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )
    return found, pipeline * (1 if is_latent(config) else tensor)


def _arithmetic(process: Process, options: Options, model: str | None) -> ModelArithmetic | None:
    """Of the model as it was started; None where that is not certain."""
    if model is None or any(options.has(name) for name in _MORE_THAN_THE_MODEL):
        return None
    config = read_config(model, process.environment, process.folder)
    tensor, pipeline = _ranks(options)
    chunk = options.number("chunked-prefill-size")
    return model_arithmetic(
        config or {},
        dtype=options.text("dtype"),
        kv_dtype=options.text("kv-cache-dtype"),
        quantization=options.text("quantization"),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        replicas=options.number("data-parallel-size", "dp-size", "dp") or 1,
        tokens_per_pass=chunk if chunk is not None and chunk > 0 else None,
    )
