"""A client of an OpenAI-style server that knows what it sent: the truth the tests compare with."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.live.tiny_model import FIRST_WORD, WORDS

_TIMEOUT_SECONDS = 120.0


def tokens(count: int, seed: int) -> list[int]:
    """``count`` random words of the tiny model; equal seeds give equal beginnings."""
    source = random.Random(seed)
    return [source.randrange(FIRST_WORD, WORDS) for _ in range(count)]


@dataclass(frozen=True)
class Ask:
    """One request. ``recompute``: the server may load nothing from host memory and storage."""

    name: str
    prompt: Sequence[int]
    recompute: bool = False
    new_tokens: int = 1


@dataclass(frozen=True)
class Answer:
    """What came back; times are CLOCK_MONOTONIC as the client saw them."""

    ask: Ask
    id: str
    sent_ns: int
    done_ns: int
    text: str
    cached_tokens: int
    metrics: dict[str, Any]


class Client:
    """Sends completions of token ids to a server on loopback."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    def ask(self, ask: Ask) -> Answer:
        """Send one request and wait for its answer.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if ask.recompute:
            body["kv_transfer_params"] = {"max_load_tokens": 0}
        sent = time.monotonic_ns()
        said = self._post("/v1/completions", body, {"X-Request-Id": ask.name})
        done = time.monotonic_ns()
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            ask,
            said["id"] + "-0",
            sent,
            done,
            said["choices"][0]["text"],
            int(details.get("cached_tokens") or 0),
            said.get("metrics") or {},
        )

    def ask_all(self, asks: Iterable[Ask], concurrency: int = 1) -> list[Answer]:
        """Send them in order, so many at a time; the answers are in the same order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.ask, asks))

    def forget_device(self) -> None:
        """Empty the KV cache of the device; host memory and storage keep theirs."""
        self._post("/reset_prefix_cache", {}, {})

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_SECONDS)
        try:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), kind | headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise OSError(f"{path}: {answer.status} {text[:200]!r}")
            return json.loads(text) if text else {}
        finally:
            connection.close()
