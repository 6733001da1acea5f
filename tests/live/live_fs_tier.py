"""vLLM with its fs tier as a node under test: prompts whose files are known, and captures of it.

What a prompt's files are is seen from outside: each prompt is sent alone once, and the files that
appear meanwhile are its own. All prompts differ from the first token on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvprobe.capture.tables import Tables
from tests.live import engine_vllm
from tests.live.engine_capture import capturing, signal_options, tables
from tests.live.engine_client import Answer, Ask, tokens
from tests.live.engine_counters import Counters, settled
from tests.live.engine_process import free_ports
from tests.live.engine_spans import SpanTee
from tests.live.engine_vllm import BLOCK_TOKENS, VllmServer

BLOCK_BYTES = 262_144
DEVICE_BLOCKS, HOST_BLOCKS = 160, 128
"""Both are less than what the stored prompts need, so that a round over them all finds nothing in
memory: a block is thrown out before its prompt's turn comes again."""
LENGTHS = (1187, 1409, 1613, 1811, 2017, 2213, 2411, 2617, 2819, 2999)
PROMPTS = 17
"""About 270 blocks."""
_SETTLE_SECONDS = 20.0


@dataclass
class Look:
    """One capture with the truth of its time: counters before and after, answers, spans."""

    file: Path
    before: Counters
    after: Counters
    answers: list[Answer]

    def counted(self, name: str, **labels: str) -> float:
        """How much a counter of the engine grew."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def tables(self) -> Tables:
        """What kvprobe recorded."""
        return tables(self.file)


class FsTier:
    """The node. ``files`` are the keys (file stems) of each stored prompt, by its number."""

    def __init__(self, disk: Path, folder: Path) -> None:
        self.root, self._folder = disk / "vllm-kv", folder
        self.root.mkdir()
        self.files: dict[int, frozenset[str]] = {}
        self._looks = 0
        self._names = 0
        with ExitStack() as stack:
            tee_port, self._otlp_port = free_ports(2)
            self.tee = stack.enter_context(SpanTee(tee_port, self._otlp_port))
            options = engine_vllm.Options(
                engine_vllm.fs_tier(self.root, HOST_BLOCKS),
                device_blocks=DEVICE_BLOCKS,
                spans_to=tee_port,
            )
            self.server = stack.enter_context(VllmServer(options, folder))
            self._store()
            self._stack = stack.pop_all()

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
        out = self._folder / f"look-{self._looks}.kvcap"
        before = self.settled()
        look = Look(out, before, before, [])
        places = (
            f"otlp:127.0.0.1:{self._otlp_port}",
            f"log:{self.server.log}",
            f"metrics:{self.server.url}/metrics",
        )
        options = signal_options(["vllm"], places)
        with capturing(out, "--root", self.root, *options):
            yield look
            self.wait_for_spans(look.answers)
            look.after = self.settled()
            time.sleep(1.5)  # the last scrape of the metrics

    def wait_for_spans(self, answers: Sequence[Answer]) -> None:
        """Wait until the server has sent the span of each."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not {a.id for a in answers} <= self.tee.latencies().keys():
            if time.monotonic() > deadline:
                raise AssertionError("vLLM did not send all spans")
            time.sleep(0.1)

    def settled(self) -> Counters:
        """The counters when nothing is written or read any more."""
        names = [f"vllm:kv_offload_tiering_{way}_bytes_total" for way in ("read", "write")]
        return settled(self.server.url, lambda c: sum(c.total(name) for name in names))

    def _store(self) -> None:
        known: frozenset[str] = frozenset()
        for number in range(PROMPTS):
            self.server.client.ask(self.asks([number])[0])
            wanted = len(self.prompt(number)) // BLOCK_TOKENS
            deadline = time.monotonic() + _SETTLE_SECONDS
            while len(now := self.stored()) < len(known) + wanted:
                if time.monotonic() > deadline:
                    raise AssertionError(f"prompt {number}: {len(now - known)} of {wanted} files")
                time.sleep(0.05)
            self.files[number] = now - known
            known = now

    def stored(self) -> frozenset[str]:
        """The keys of all files."""
        return frozenset(path.stem for path in self.root.rglob("*.bin"))

    def __enter__(self) -> FsTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._stack.close()


def number_of(request: str) -> int:
    """The prompt's number, from a request id such as ``cmpl-r7-3-0``."""
    return int(request.split("-")[2])
