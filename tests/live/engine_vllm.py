"""vLLM's CPU build as an OpenAI-style server with the tiny model: what the tests start."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.live.engine_client import Client
from tests.live.engine_process import EngineProcess, answers, free_ports, python_of
from tests.live.tiny_model import BYTES_PER_TOKEN, write_model

NAME = "tiny"
MOST_TOKENS = 8192
BLOCK_TOKENS = 128
"""vLLM's block on CPUs, and so the tokens of a file."""
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
_READY_SECONDS = 180.0
_PLUGIN = Path(__file__).parent / "vllm_plugin"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Options:
    """How a server is started.

    ``device_blocks`` and ``host_blocks`` are what its own KV cache and the host memory tier hold,
    in blocks of 128 tokens. ``spans_to`` is the port of an OTLP receiver (HTTP). ``debug`` logs
    what the scheduler finds.
    """

    connector: Mapping[str, Any]
    device_blocks: int = 256
    spans_to: int | None = None
    debug: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def fs_tier(root: Path, host_blocks: int) -> dict[str, Any]:
    """The configuration of tiered offloading to files below ``root``."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "host_tiering_spec",
            "cpu_bytes_to_use": host_blocks * BLOCK_BYTES,
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(root), "n_read_threads": 4, "n_write_threads": 4}
            ],
        },
    }


class VllmServer:
    """A running server; a context that ends it and what it leaves in shared memory."""

    def __init__(self, options: Options, folder: Path) -> None:
        """Start it and wait until it serves; model, log and counters are below ``folder``.

        Raises:
            EngineMissingError: vLLM is not installed.
            EngineFailedError: it does not come up.
        """
        (self.port,) = free_ports(1)
        self._engine_id = f"kvprobe-{secrets.token_hex(6)}"
        self.log = folder / f"vllm-{self.port}.log"
        command = _command(
            options, self.port, self._engine_id, write_model(folder / "model", MOST_TOKENS)
        )
        self.process = EngineProcess("vllm", command, self.log, _environment(options))
        try:
            self.process.wait_until(lambda: answers(f"{self.url}/health"), _READY_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.client = Client(self.port, NAME)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it; what it leaves in shared memory bears the id that we gave it, or its pid."""
        pids = self.process.members()
        self.process.stop()
        left = list(_SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*"))
        left += [path for pid in pids for path in _SHARED_MEMORY.glob(f"lmcache_kv_{pid}_*")]
        for path in left:
            with suppress(FileNotFoundError):
                path.unlink()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.stop()


def _command(options: Options, port: int, engine_id: str, model: Path) -> list[str]:
    words = [python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model), "--served-model-name", NAME, "--load-format", "dummy"]
    words += ["--dtype", "float32", "--max-model-len", str(MOST_TOKENS), "--max-num-seqs", "4"]
    words += ["--num-gpu-blocks-override", str(options.device_blocks), "--enforce-eager"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enable-request-id-headers"]
    words += ["--enable-prompt-tokens-details", "--enable-per-request-metrics"]
    words += ["--kv-transfer-config", json.dumps({**options.connector, "engine_id": engine_id})]
    if options.spans_to is not None:
        words += ["--otlp-traces-endpoint", f"http://127.0.0.1:{options.spans_to}/v1/traces"]
    return words


def _environment(options: Options) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread on one CPU: of several each prefill waits for the one that is disturbed.
        "VLLM_CPU_OMP_THREADS_BIND": str((os.cpu_count() or 1) - 1),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG" if options.debug else "INFO",
        "PYTHONPATH": str(_PLUGIN),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "LMCACHE_TRACK_USAGE": "false",
        **options.environment,
    }
