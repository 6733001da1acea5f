"""A node under test: a server, prompts whose files are known, and captures with the truth beside.

What a prompt's files are is seen from outside: each prompt is sent alone once, and the files that
appear meanwhile are its own. All prompts differ from the first token on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.live import engine_vllm
from tests.live.engine_capture import Seen, capturing, seen, signal_options
from tests.live.engine_client import Answer, Ask, Client, tokens
from tests.live.engine_counters import Counters, settled
from tests.live.engine_lmcache import CHUNK_TOKENS, LMCacheServer
from tests.live.engine_process import free_ports
from tests.live.engine_spans import SpanTee
from tests.live.engine_vllm import BLOCK_TOKENS, VllmServer

LENGTHS = (1187, 1409, 1613, 1811, 2017, 2213, 2411, 2617, 2819, 2999)
PROMPTS = 17
_SETTLE_SECONDS = 30.0


@dataclass
class Look:
    """One capture with the truth of its time; ``before`` and ``after`` are counters by server."""

    file: Path
    before: Mapping[str, Counters]
    after: Mapping[str, Counters] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    def counted(self, server: str, name: str, **labels: str) -> int:
        """How much a counter grew; 0 where there is none."""
        grown = self.after[server].total(name, **labels) - self.before[server].total(name, **labels)
        return round(grown)

    @cached_property
    def seen(self) -> Seen:
        """What kvprobe saw."""
        return seen(self.file)


class Node:
    """What the nodes have in common. ``files`` are the keys of each stored prompt, by number."""

    server: VllmServer

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self._folder = root, folder
        self.files: dict[int, frozenset[str]] = {}
        self._looks = self._names = 0
        self._stack = ExitStack()
        tee_port, self._otlp_port = free_ports(2)
        self.spans_to = tee_port
        self.tee = self._stack.enter_context(SpanTee(tee_port, self._otlp_port))
        root.mkdir()

    @property
    def client(self) -> Client:
        """The client of its server."""
        return self.server.client

    def prompt(self, number: int) -> list[int]:
        """The tokens of prompt ``number``."""
        return tokens(LENGTHS[number % len(LENGTHS)], number)

    def asks(self, numbers: Sequence[int], recompute: bool = False) -> list[Ask]:
        """Requests with these prompts, each under a name of its own that ends in its number."""
        kind = "c" if recompute else "r"
        made = [
            Ask(f"{kind}{self._names + place}-{number}", self.prompt(number), recompute)
            for place, number in enumerate(numbers)
        ]
        self._names += len(made)
        return made

    @contextmanager
    def look(self) -> Iterator[Look]:
        """Capture while the context lasts; append the answers to the look."""
        self._looks += 1
        look = Look(self._folder / f"look-{self._looks}.kvcap", self.counters())
        places = [f"otlp:127.0.0.1:{self._otlp_port}", *self.places()]
        with capturing(look.file, "--root", self.root, *signal_options(places)):
            yield look
            self.wait_for_spans(look.answers)
            look.after = self.counters()
            time.sleep(1.5)  # kvprobe's last look at the counters

    def wait_for_spans(self, answers: Sequence[Answer]) -> None:
        """Wait until the server has sent the span of each."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not {a.id for a in answers} <= self.tee.latencies().keys():
            if time.monotonic() > deadline:
                raise AssertionError("vLLM did not send all spans")
            time.sleep(0.1)

    def places(self) -> list[str]:
        """Where kvprobe hears the engine, spans apart."""
        return [f"log:{self.server.log}", f"metrics:{self.server.url}/metrics"]

    def counters(self) -> dict[str, Counters]:
        """The counters of each server, when nothing is written or read any more."""
        raise NotImplementedError

    def store(self, suffix: str, unit_tokens: int) -> None:
        """Send each prompt alone and note the files that appear."""
        known: frozenset[str] = frozenset()
        for number in range(PROMPTS):
            self.client.ask(self.asks([number])[0])
            wanted = len(known) + len(self.prompt(number)) // unit_tokens
            deadline = time.monotonic() + _SETTLE_SECONDS
            while len(now := self.keys_stored(suffix)) < wanted:
                if time.monotonic() > deadline:
                    raise AssertionError(f"prompt {number}: {len(now)} of {wanted} files")
                time.sleep(0.05)
            self.files[number], known = now - known, now

    def keys_stored(self, suffix: str) -> frozenset[str]:
        """The keys of all files."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()


class FsTierNode(Node):
    """vLLM with its fs tier.

    Device and host memory hold less than the stored prompts need, so that a round over them all
    finds nothing there: a block is thrown out before its prompt's turn comes again.
    """

    DEVICE_BLOCKS, HOST_BLOCKS = 160, 128

    def __init__(self, disk: Path, folder: Path) -> None:
        super().__init__(disk / "vllm-kv", folder)
        try:
            options = engine_vllm.Options(
                engine_vllm.fs_tier(self.root, self.HOST_BLOCKS),
                device_blocks=self.DEVICE_BLOCKS,
                spans_to=self.spans_to,
            )
            self.server = self._stack.enter_context(VllmServer(options, folder))
            self.store(".bin", BLOCK_TOKENS)
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, Counters]:
        """vLLM's."""
        names = [f"vllm:kv_offload_tiering_{way}_bytes_total" for way in ("read", "write")]
        return {"vllm": settled(self.server.url, lambda c: sum(c.total(name) for name in names))}

    def keys_stored(self, suffix: str) -> frozenset[str]:
        """File stems."""
        return frozenset(path.stem for path in self.root.rglob(f"*{suffix}"))


class LMCacheNode(Node):
    """vLLM with LMCache's server, both as they come."""

    def __init__(self, disk: Path, folder: Path) -> None:
        super().__init__(disk / "lmcache-kv", folder)
        try:
            self.lmcache = self._stack.enter_context(LMCacheServer(folder, self.root))
            options = engine_vllm.Options(
                self.lmcache.connector(), device_blocks=160, spans_to=self.spans_to
            )
            self.server = self._stack.enter_context(VllmServer(options, folder))
            self.store(".data", CHUNK_TOKENS)
        except BaseException:
            self.close()
            raise

    def forget_memory(self) -> None:
        """Leave the files only."""
        self.lmcache.forget_memory()
        self.client.forget_device()

    def places(self) -> list[str]:
        """Those of both servers."""
        mine = [f"log:{self.lmcache.log}", f"files:{self.lmcache.hashes}"]
        return [*super().places(), *mine, f"metrics:{self.lmcache.url}/metrics"]

    def counters(self) -> dict[str, Counters]:
        """Those of both servers."""

        def busy(c: Counters) -> float:
            names = ("l2_store_completed_objects_chunks", "l2_prefetch_load_completed_chunks")
            return sum(c.total(f"lmcache_mp_{name}_total") for name in names)

        cache = settled(self.lmcache.url, busy)
        return {"lmcache": cache, "vllm": Counters.read(self.server.url)}

    def keys_stored(self, suffix: str) -> frozenset[str]:
        """The fourth field of the file names."""
        names = [path.name for path in self.root.glob(f"*{suffix}")]
        return frozenset(name.removesuffix(suffix).split("@")[3] for name in names)


def number_of(request: str) -> int:
    """The prompt's number, from a request id such as ``cmpl-r7-3-0``."""
    return int(request.split("-")[2])
