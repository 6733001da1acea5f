"""Which processes are LMCache's server or run LMCache in themselves, and how they are set."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvprobe.adapter import Process, RunningEngine, SignalPlace
from kvprobe.engines._model_config import is_latent, rank_bytes_per_token, read_config
from kvprobe.engines._options import Options, address, integer, json_object, own_port, words
from kvprobe.model import EngineFacts

NAME = "lmcache"
CHUNK_TOKENS = 256
"""LMCache's default, of the server and in-process."""
_HTTP_PORT = 8080
_GRPC_PORT = 4317
_CONFIG_BYTES = 1 << 18
_SETTING = re.compile(r"([a-z][a-z0-9_]*):[ \t]+(.*)")
_TO_A_FILE = "send the output of {} to a file or to the journal: its log names requests and hits"


def detect(process: Process) -> RunningEngine | None:
    """LMCache's server, or an engine that runs LMCache in its own processes."""
    options = Options(process.arguments)
    if _is_server(options):
        return _server(process, options)
    return _in_process(process, options) if _runs_lmcache(process, options) else None


def _is_python(options: Options) -> bool:
    program = os.path.basename(options.rest[0]) if options.rest else ""
    return program.startswith(("python", "lmcache", "vllm", "sglang"))


# ---------------------------------------------------------------- server


def _is_server(options: Options) -> bool:
    if not _is_python(options):
        return False  # a shell or a container's client that has the same words
    module = options.text("m") or ""
    programs = [os.path.basename(word) for word in options.rest[:3]]
    return (not module and ("lmcache", "server") in pairwise(programs)) or (
        module.startswith("lmcache.v1.multiprocess.") and module.endswith("server")
    )


def _server(process: Process, options: Options) -> RunningEngine:
    adapters = [json_object(text) for text in options.all("l2-adapter")]
    roots = [root for adapter in adapters if (root := _root(adapter, process.folder))]
    chunk = options.number("chunk-size") or CHUNK_TOKENS
    only = adapters[0] if len(adapters) == 1 else {}
    kinds = "+".join(str(adapter.get("type", "?")) for adapter in adapters) or "none"
    memory = options.text("l1-size-gb")
    signals, advice = _server_signals(process, options)
    return RunningEngine(
        engine=NAME,
        pid=process.pid,
        shape=f"server, chunks of {chunk} tokens, storage {kinds}"
        + (f", {memory} GB of memory" if memory else ""),
        roots=tuple(dict.fromkeys(roots)),
        signals=signals,
        advice=advice,
        facts=EngineFacts(
            name=NAME,
            unit_tokens=chunk,
            reads_in_flight=_reads_in_flight(only),
            direct=_direct(only),
            root=roots[0] if roots else None,
        ),
    )


def _server_signals(
    process: Process, options: Options
) -> tuple[tuple[SignalPlace, ...], tuple[str, ...]]:
    signals, advice = [], []
    hashes = options.text("lookup-hash-log-dir")
    if hashes:
        signals.append(SignalPlace("files", _absolute(hashes, process.folder)))
    else:
        advice.append(
            "add --lookup-hash-log-dir DIR to lmcache server: it names the chunks of each request, "
            "so that each byte read is tied to its request exactly"
        )
    if process.log:
        signals.append(SignalPlace("log", process.log))
    else:
        advice.append(_TO_A_FILE.format("lmcache server"))
    endpoint = options.text("otlp-endpoint")
    if endpoint is None:  # with it metrics are pushed, and the page has none of LMCache's
        at = address(options.text("http-host"), options.number("http-port") or _HTTP_PORT)
        signals.append(SignalPlace("metrics", f"http://{at}/metrics"))
    elif options.has("enable-tracing") and (port := own_port(endpoint, _GRPC_PORT)):
        signals.append(SignalPlace("otlp", str(port)))
    return tuple(signals), tuple(advice)


def _root(adapter: Mapping[str, Any], folder: str | None) -> str | None:
    inner = adapter.get("backend_params")
    for place, name in (
        (adapter, "base_path"),
        (adapter, "device_path"),
        (inner if isinstance(inner, dict) else {}, "file_path"),
    ):
        path = words(place.get(name))
        if path:
            return _absolute(path, folder)
    return None


def _reads_in_flight(adapter: Mapping[str, Any]) -> int | None:
    """Files of one request that an adapter (0.5.6) reads at once; None where it is not fixed."""
    kind = adapter.get("type")
    if kind == "fs":
        return 1
    if kind == "fs_native":
        return integer(adapter.get("num_workers", 4))
    if kind == "raw_block" and adapter.get("io_engine", "posix") == "posix":
        return integer(adapter.get("num_load_workers", 4))
    return None


def _direct(adapter: Mapping[str, Any]) -> bool | None:
    default = {"fs": False, "fs_native": False, "raw_block": True}.get(str(adapter.get("type")))
    return default if default is None else bool(adapter.get("use_odirect", default))


# ---------------------------------------------------------------- in-process


def _runs_lmcache(process: Process, options: Options) -> bool:
    """Whether this is the first process of an engine with LMCache in it.

    Its children have the same environment, but are named by their engine (``VLLM::``, ``sglang::``)
    or are multiprocessing's own.
    """
    if not _is_python(options):
        return False
    connector = options.mapping("kv-transfer-config")
    if connector:
        return "LMCacheConnectorV1" in str(connector)
    if options.has("enable-lmcache"):
        return True
    script = next((word for word in options.rest[1:] if word.endswith(".py")), None)
    settings = ("LMCACHE_CONFIG_FILE", "LMCACHE_LOCAL_DISK")
    return (
        process.name.startswith("python")
        and script is not None
        and any(process.environment.get(name) for name in settings)
    )


def _in_process(process: Process, options: Options) -> RunningEngine:
    settings = _settings(process) | _connector_settings(options.mapping("kv-transfer-config"))
    roots = _folders(settings, process.folder)
    chunk = integer(settings.get("chunk_size")) or CHUNK_TOKENS
    extra = json_object(settings.get("extra_config"))
    advice = []
    if not process.log:
        advice.append(_TO_A_FILE.format("the engine"))
    if settings.get("local_disk") and settings.get("max_local_disk_size", "0") in ("0", "0.0"):
        advice.append("max_local_disk_size is 0, so local_disk keeps nothing: set it in GB")
    advice.append(
        "LMCache in-process does not name chunks; lmcache server --lookup-hash-log-dir DIR with "
        "LMCacheMPConnector does, so that each byte read is tied to its request exactly"
    )
    rank_bytes, copies, model = _model(process, options)
    direct = extra.get("use_odirect")
    return RunningEngine(
        engine=NAME,
        pid=process.pid,
        shape=f"in-process, chunks of {chunk} tokens",
        roots=roots,
        signals=(SignalPlace("log", process.log),) if process.log else (),
        advice=tuple(advice),
        facts=EngineFacts(
            name=NAME,
            model=model,
            unit_tokens=chunk,
            unit_bytes=chunk * rank_bytes if rank_bytes else None,
            bytes_per_token=rank_bytes * copies if rank_bytes else None,
            direct=direct if isinstance(direct, bool) else None,
            root=roots[0] if roots else None,
        ),
    )


def _model(process: Process, options: Options) -> tuple[int | None, int, str | None]:
    """Bytes that a rank keeps of a token, ranks that keep their own, the model."""
    model = options.text("model", "model-path")
    if model is None and "serve" in options.rest[:-1]:
        model = options.rest[options.rest.index("serve") + 1]
    if model is None:
        return None, 1, None
    config = read_config(model, process.environment, process.folder)
    if config is None:
        return None, 1, model
    tensor = options.number("tensor-parallel-size", "tp", "tp-size") or 1
    pipeline = options.number("pipeline-parallel-size", "pp", "pp-size") or 1
    found = rank_bytes_per_token(
        config,
        dtype=options.text("dtype"),
        kv_dtype=options.text("kv-cache-dtype"),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )
    # Of a latent cache only the first rank stores its copy.
    return found, pipeline * (1 if is_latent(config) else tensor), model


def _settings(process: Process) -> dict[str, str]:
    """The configuration file's flat ``name: value`` lines; the environment goes before them."""
    found: dict[str, str] = {}
    path = process.environment.get("LMCACHE_CONFIG_FILE")
    if path:
        try:
            with Path(_absolute(path, process.folder)).open("rb") as file:
                text = file.read(_CONFIG_BYTES).decode("utf-8", "replace")
        except OSError:
            text = ""
        for line in text.splitlines():
            match = _SETTING.fullmatch(line)
            if match:
                found[match[1]] = _scalar(match[2])
    for name, value in process.environment.items():
        if name.startswith("LMCACHE_") and name != "LMCACHE_CONFIG_FILE":
            found[name[len("LMCACHE_") :].lower()] = value
    return found


def _connector_settings(connector: Mapping[str, Any]) -> dict[str, str]:
    """What ``kv_connector_extra_config`` says as ``lmcache.NAME``; it goes before all others."""
    extra = connector.get("kv_connector_extra_config")
    named = extra.items() if isinstance(extra, dict) else ()
    return {
        name.removeprefix("lmcache."): value if isinstance(value, str) else json.dumps(value)
        for name, value in named
        if name.startswith("lmcache.")
    }


def _scalar(text: str) -> str:
    """A YAML scalar of one line without its quotes and comment."""
    text = text.strip()
    if text[:1] in ("'", '"') and text.find(text[0], 1) > 0:
        return text[1 : text.index(text[0], 1)]
    return "" if text.startswith("#") else text.split(" #", 1)[0].strip()


def _folders(settings: Mapping[str, str], folder: str | None) -> tuple[str, ...]:
    """Folders of local_disk, of GDS and of an ``fs://`` remote, which may be comma lists."""
    remote = settings.get("remote_url", "")
    texts = [settings.get("local_disk", ""), settings.get("gds_path", "")]
    texts.append(urlsplit(remote).path if remote.startswith("fs://") else "")
    paths = [word.strip().removeprefix("file://") for text in texts for word in text.split(",")]
    return tuple(dict.fromkeys(_absolute(p, folder) for p in paths if p and p != "null"))


def _absolute(path: str, folder: str | None) -> str:
    return os.path.normpath(os.path.join(folder or "/", path))
