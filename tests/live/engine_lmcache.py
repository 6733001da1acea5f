"""LMCache's server with an ``fs`` adapter, and the connector by which vLLM uses it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.live.engine_process import EngineProcess, answers, free_ports, python_of

CHUNK_TOKENS = 256
_READY_SECONDS = 120.0


class LMCacheServer:
    """A running ``lmcache server``; a context that ends it.

    ``root`` has the chunks, ``hashes`` the lookup-hash log.
    """

    def __init__(self, folder: Path, root: Path, l1_gb: int = 1) -> None:
        """Start it and wait until it serves.

        Raises:
            EngineMissingError: LMCache is not installed.
            EngineFailedError: it does not come up.
        """
        self.port, self._http = free_ports(2)
        self.root, self.hashes = root, folder / "lookup-hashes"
        self.hashes.mkdir(exist_ok=True)
        self.log = folder / f"lmcache-{self.port}.log"
        adapter = json.dumps({"type": "fs", "base_path": str(root)})
        lmcache = Path(python_of("vllm")).with_name("lmcache")
        words = [python_of("vllm"), str(lmcache), "server"]
        words += ["--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--http-host", "127.0.0.1", "--http-port", str(self._http)]
        words += ["--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU"]
        words += ["--l1-size-gb", str(l1_gb), "--l1-init-size-gb", str(l1_gb)]
        words += ["--supported-transfer-mode", "auto", "--metrics-sample-rate", "1"]
        words += ["--l2-adapter", adapter, "--lookup-hash-log-dir", str(self.hashes)]
        self.process = EngineProcess("lmcache server", words, self.log, _ENVIRONMENT)
        try:
            self.process.wait_until(lambda: answers(f"{self.url}/healthcheck"), _READY_SECONDS)
        except BaseException:
            self.process.stop()
            raise

    @property
    def url(self) -> str:
        """Where its HTTP side listens."""
        return f"http://127.0.0.1:{self._http}"

    def forget_memory(self) -> None:
        """Empty its memory (L1); the files stay."""
        request = urllib.request.Request(f"{self.url}/cache/clear", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def connector(self) -> dict[str, Any]:
        """vLLM's configuration of the connector to this server."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }

    def __enter__(self) -> LMCacheServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.process.stop()


_ENVIRONMENT = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "INFO",
    "NO_COLOR": "1",
}
