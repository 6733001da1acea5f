"""A running vLLM server as its command line shows it: connectors, folders, and how to hear it.

The process that was started by hand or by a container is the server; EngineCore (which reads the
files of the fs tier) and workers (those of other connectors) are its descendants, and rename
themselves. ``python -m dynamo.vllm`` runs vLLM with the same options and without its HTTP server.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvprobe.adapter import Process, SignalPlace
from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines._model_arithmetic import model_arithmetic
from kvprobe.engines._model_config import read_config
from kvprobe.engines._options import Options, address, own_port, words

_DYNAMO = "dynamo.vllm"
OFFLOADING = "OffloadingConnector"
_TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_MORE_THAN_THE_MODEL = (
    "config",
    "enable-lora",
    "hf-overrides",
    "sc",
    "speculative-config",
)
"""Options with which a prefill computes what the model's configuration does not tell."""
_VERSION = re.compile(r"/vllm(_cpu)?-(\d+)\.(\d+)(\S*)\.dist-info$")


@dataclass(frozen=True)
class Connector:
    """A KV connector with its ``kv_connector_extra_config``."""

    name: str
    extra: Mapping[str, Any]

    @property
    def tiers(self) -> tuple[Mapping[str, Any], ...]:
        """Tiers below host memory (``TieringOffloadingSpec``)."""
        found = self.extra.get("secondary_tiers")
        return tuple(t for t in found if isinstance(t, dict)) if isinstance(found, list) else ()

    @property
    def is_llmd(self) -> bool:
        """Whether llm-d's backend keeps the files."""
        return str(self.extra.get("spec_module_path", "")).startswith("llmd_fs_backend")


@dataclass(frozen=True)
class Server:
    """A vLLM server. ``version`` is (major, minor), ``http`` whether it serves metrics itself."""

    process: Process
    options: Options
    model: str | None
    connectors: tuple[Connector, ...]
    http: bool
    version: tuple[int, int] | None = None
    cpu_build: bool = False

    def connector(self, name: str) -> Connector | None:
        """The connector of that name, also one of several."""
        return next((c for c in self.connectors if c.name == name), None)

    @property
    def offloading_extra(self) -> Mapping[str, Any]:
        """The extra configuration of OffloadingConnector."""
        found = self.connector(OFFLOADING)
        return {} if found is None else found.extra

    @property
    def tiers(self) -> tuple[Mapping[str, Any], ...]:
        """Tiers below host memory (``TieringOffloadingSpec``)."""
        found = self.connector(OFFLOADING)
        return () if found is None else found.tiers

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share the KV heads."""
        return self.options.number("tensor-parallel-size", "tp") or 1

    @property
    def pipeline_parallel(self) -> int:
        """Ranks that share the layers."""
        return self.options.number("pipeline-parallel-size", "pp") or 1

    @property
    def context_parallel(self) -> bool:
        """Whether ranks share the tokens of a block."""
        names = ("decode-context-parallel-size", "dcp"), ("prefill-context-parallel-size", "pcp")
        return any((self.options.number(*name) or 1) > 1 for name in names)


def find_server(process: Process) -> Server | None:
    """The vLLM server that a process is, or None."""
    found = _server_arguments(process.arguments)
    if found is None or process.name.startswith("VLLM::"):
        return None
    arguments, http = found
    options = Options(arguments)
    model = options.text("model")
    if model is None and arguments and not arguments[0].startswith("-"):
        model = arguments[0]
    version, cpu_build = _installed(process)
    connectors = tuple(_connectors(options.mapping("kv-transfer-config")))
    http = http and not (options.has("headless") or options.has("grpc"))
    return Server(process, options, model, connectors, http, version, cpu_build)


def storage_roots(server: Server) -> tuple[str, ...]:
    """Folders of the files that vLLM itself keeps; other connectors' are not its own."""
    return tuple(
        dict.fromkeys(
            os.path.normpath(os.path.join(server.process.folder or "/", root))
            for connector in server.connectors
            for root in _roots(connector)
        )
    )


def arithmetic(server: Server) -> ModelArithmetic | None:
    """Of the model as it was started; None where that is not certain."""
    options, process = server.options, server.process
    more = any(options.has(name) or options.mapping(name) for name in _MORE_THAN_THE_MODEL)
    if server.model is None or server.context_parallel or more:
        return None
    config = read_config(server.model, process.environment, process.folder)
    bounds = ("max-num-batched-tokens", "long-prefill-token-threshold")
    given = [n for name in bounds if (n := options.number(name)) is not None and n > 0]
    return model_arithmetic(
        config or {},
        dtype=options.text("dtype"),
        kv_dtype=options.text("kv-cache-dtype"),
        quantization=options.text("quantization", "q"),
        tensor_parallel=server.tensor_parallel,
        pipeline_parallel=server.pipeline_parallel,
        replicas=options.number("data-parallel-size", "dp") or 1,
        tokens_per_pass=min(given, default=None),
    )


def shape(server: Server) -> str:
    """The server in a few words: ``0.32, llama, TP 2, OffloadingConnector with tier fs``."""
    parts = [".".join(map(str, server.version))] if server.version else []
    parts += [server.model.rstrip("/").rpartition("/")[2]] if server.model else []
    sizes = {"TP": server.tensor_parallel, "PP": server.pipeline_parallel}
    sizes["DP"] = server.options.number("data-parallel-size", "dp") or 1
    parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    parts += [_described(connector) for connector in server.connectors]
    if not server.connectors:
        native = server.options.has("kv-offloading-size")
        parts.append("offloading to host memory" if native else "no KV connector")
    return ", ".join(parts)


def signals(server: Server) -> tuple[SignalPlace, ...]:
    """What it says as it was started."""
    places = []
    options, log = server.options, server.process.log
    if server.http and not options.has("disable-log-stats"):
        tls = "https" if options.text("ssl-certfile") else "http"
        host = address(options.text("host"), options.number("port") or 8000)
        places.append(SignalPlace("metrics", f"{tls}://{host}/metrics"))
    traces = options.text("otlp-traces-endpoint")
    port = own_port(traces, _traces_port(server)) if traces else None
    if port is not None:
        places.append(SignalPlace("otlp", str(port)))
    if log is not None and (_logs_debug(server) or options.has("enable-log-requests")):
        places.append(SignalPlace("log", log))
    events = options.mapping("kv-events-config")
    if events.get("enable_kv_cache_events") is True and events.get("publisher", "zmq") == "zmq":
        endpoint = words(events.get("endpoint")) or "tcp://*:5557"
        if "*" in endpoint:  # otherwise it connects to a subscriber, which has the port
            places.append(SignalPlace("kv-events", endpoint))
    return tuple(places)


def advice(server: Server) -> tuple[str, ...]:
    """What to add for a better signal; nothing of options that a configuration file may hold."""
    if server.options.has("config"):
        return ()
    said = []
    traces = server.options.text("otlp-traces-endpoint")
    if traces is None:
        said.append(
            f"add --otlp-traces-endpoint {_own_endpoint(server)}: arrival, prefill and first token "
            "of each request to the nanosecond (kvprobe receives the spans while it looks)"
        )
    elif own_port(traces, 1) is None:
        said.append(
            f"its spans go to {traces}: have that collector forward them to "
            f"{_own_endpoint(server)}, or kvprobe knows no times of requests"
        )
    if server.connector(OFFLOADING) is not None:
        said += _log_advice(server)
    if server.http and server.options.has("disable-log-stats"):
        said.append("leave out --disable-log-stats: without counters kvprobe cannot check its own")
    return tuple(said)


def _log_advice(server: Server) -> list[str]:
    if not _logs_debug(server):
        return [
            "start it with VLLM_LOGGING_LEVEL=DEBUG and its output in a file: how many tokens each "
            "request found in host memory and storage (prompts are then logged in full)"
        ]
    if server.process.log is None:
        return [
            "send its output to a file, or name its journal unit (journal:UNIT): its DEBUG log "
            "tells how many tokens each request found in host memory and storage"
        ]
    return []


def _server_arguments(argv: tuple[str, ...]) -> tuple[tuple[str, ...], bool] | None:
    """What follows the words that start a server, and whether it serves HTTP."""
    program = argv[0].rpartition("/")[2] if argv else ""
    if not program.startswith(("python", "vllm")):
        return None  # a shell, sudo or a container's client that has the same words
    for place, word in enumerate(argv[:8]):
        rest = argv[place + 1 :]
        if word.rpartition("/")[2] == "vllm" and rest[:1] == ("serve",):
            return rest[1:], True
        if word.endswith("/vllm/entrypoints/openai/api_server.py"):
            return rest, True
        if word == "-m" and rest:
            module, rest = rest[0], rest[1:]
            if module.startswith("vllm.entrypoints.") and module.endswith("api_server"):
                return rest, True
            if module in ("vllm", "vllm.entrypoints.cli.main") and rest[:1] == ("serve",):
                return rest[1:], True
            return (rest, False) if module == _DYNAMO else None
    return None


def _connectors(config: Mapping[str, Any]) -> Iterator[Connector]:
    name, extra = words(config.get("kv_connector")), config.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    several = extra.get("connectors")
    if name == "MultiConnector" and isinstance(several, list):
        for one in several[:16]:
            if isinstance(one, dict) and one.get("kv_connector") != name:
                yield from _connectors(one)
    elif name is not None:
        yield Connector(name, extra)


def _roots(connector: Connector) -> Iterator[str]:
    if connector.name == OFFLOADING:
        yield from (
            root
            for tier in connector.tiers
            if tier.get("type") == "fs" and (root := words(tier.get("root_dir")))
        )
    elif connector.name == "SimpleCPUOffloadConnector":
        slots = words(connector.extra.get("disk_path"))
        if slots is not None and connector.extra.get("kv_offload_backend", "disk") == "disk":
            yield os.path.dirname(slots)
    elif connector.name in ("ExampleConnector", "SharedStorageConnector"):
        yield words(connector.extra.get("shared_storage_path")) or "/tmp"


def _described(connector: Connector) -> str:
    if connector.is_llmd:
        return f"{connector.name} with llm-d's files"
    tiers = [str(tier.get("type")) for tier in connector.tiers]
    return f"{connector.name} with tier {', '.join(tiers)}" if tiers else connector.name


def _logs_debug(server: Server) -> bool:
    return server.process.environment.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG"


def _traces_port(server: Server) -> int:
    return 4318 if _by_http(server) else 4317


def _own_endpoint(server: Server) -> str:
    return "http://127.0.0.1:4318/v1/traces" if _by_http(server) else "http://127.0.0.1:4317"


def _by_http(server: Server) -> bool:
    return server.process.environment.get(_TRACES_PROTOCOL, "grpc") == "http/protobuf"


def _installed(process: Process) -> tuple[tuple[int, int] | None, bool]:
    """Version of the vLLM that the process runs, and whether it is a build for CPUs."""
    own = {word.rpartition("/bin/")[0] for word in process.arguments[:4] if "/bin/" in word}
    own.add(process.environment.get("VIRTUAL_ENV", ""))
    for place in (*sorted(own - {""}), "/usr/local", "/usr"):
        here = glob.escape(f"/proc/{process.pid}/root{place}")
        for path in glob.iglob(f"{here}/lib/python3*/*-packages/vllm*.dist-info"):
            if match := _VERSION.search(path):
                build = match[1] is not None or "+cpu" in match[4]
                return (int(match[2]), int(match[3])), build
    return None, False
