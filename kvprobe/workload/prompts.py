"""Prompts as chains of block ids: read from a trace or made with a stated prefix sharing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from kvprobe.errors import KvprobeError

MOONCAKE_BLOCK_TOKENS = 512
SYNTHETIC_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``blocks`` are prefix-chained ids: equal ids mean equal tokens up to there.

    ``arrival_ns`` counts from the start of the trace.
    """

    arrival_ns: int
    tokens: int
    blocks: tuple[int, ...]
    block_tokens: int

    def cut(self, most: int | None) -> Prompt:
        """The same prompt, at most ``most`` tokens long."""
        if most is None or self.tokens <= most:
            return self
        blocks = self.blocks[: -(-most // self.block_tokens)]
        return Prompt(self.arrival_ns, most, blocks, self.block_tokens)

    def chunks(self, unit_tokens: int) -> list[tuple[int, int]]:
        """Identity of each complete chunk of ``unit_tokens`` tokens.

        A chunk is named after its last token: the block that token is in and how far into the
        block the chunk reaches. As blocks are prefix-chained, equal identities mean equal prefixes,
        for units smaller and larger than a block. Two prompts that part inside a block share none
        of it, so sharing is never overstated.
        """
        size = self.block_tokens
        ends = range(unit_tokens, self.tokens + 1, unit_tokens)
        return [(self.blocks[(end - 1) // size], end - (end - 1) // size * size) for end in ends]


def chunk_key(identity: tuple[int, int], unit_tokens: int) -> str:
    """The 64 hex digits that stand for a chunk, as a hash of its tokens would in an engine."""
    block, reach = identity
    return hashlib.sha256(b"%d:%d:%d" % (block, reach, unit_tokens)).hexdigest()


def read_mooncake(path: str, most: int | None = None) -> Iterator[Prompt]:
    """Prompts of a Mooncake trace (JSON lines; times in ms; 512-token prefix-chained ids).

    Raises:
        KvprobeError: the file cannot be read, or a line is not a request.
    """
    try:
        file = Path(path).open(encoding="utf-8")  # noqa: SIM115 - closed below, error told apart
    except OSError as error:
        raise KvprobeError(
            f"cannot read trace {path}: {error.strerror}", "check the path"
        ) from None
    with file:
        for number, line in enumerate(islice(file, most), 1):
            try:
                row = json.loads(line)
                prompt = Prompt(
                    int(row["timestamp"] * 1_000_000),
                    int(row["input_length"]),
                    tuple(int(block) for block in row["hash_ids"]),
                    MOONCAKE_BLOCK_TOKENS,
                )
            except (ValueError, KeyError, TypeError):
                raise KvprobeError(
                    f"not a request at {path} line {number}",
                    "want JSON lines with timestamp, input_length and hash_ids",
                ) from None
            if -(-prompt.tokens // MOONCAKE_BLOCK_TOKENS) != len(prompt.blocks):
                raise KvprobeError(
                    f"{len(prompt.blocks)} hash ids for {prompt.tokens} tokens "
                    f"at {path} line {number}",
                    "hash_ids must be one per 512 tokens",
                )
            yield prompt


@dataclass(frozen=True)
class Synthetic:
    """A made-up trace. Lengths are log-normal around ``prompt_tokens``.

    Each prompt starts with the first ``shared_share`` of its length from one of ``prefixes``
    shared texts, picked by a Zipf law with exponent ``zipf`` (0: evenly); the rest is its own.
    """

    requests: int
    prompt_tokens: int = 8192
    sigma: float = 0.5
    prefixes: int = 16
    zipf: float = 1.0
    shared_share: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            KvprobeError: a value is out of its range.
        """
        if self.requests < 1 or self.prompt_tokens < 1 or self.prefixes < 1:
            raise KvprobeError("a synthetic trace needs positive counts", "see --help")
        if not 0 <= self.shared_share <= 1 or self.sigma < 0 or self.zipf < 0:
            raise KvprobeError(
                "shared share must be 0..1, sigma and zipf not negative", "see --help"
            )

    def prompts(self) -> list[Prompt]:
        """The prompts, without arrival times; equal for equal seeds."""
        random = np.random.default_rng(self.seed)
        noise = random.normal(0.0, self.sigma, self.requests)
        lengths = np.maximum(1, np.rint(self.prompt_tokens * np.exp(noise))).astype(np.int64)
        weights = 1.0 / np.arange(1, self.prefixes + 1) ** self.zipf
        families = random.choice(self.prefixes, self.requests, p=weights / weights.sum())
        return [
            self._prompt(number, int(length), int(family))
            for number, (length, family) in enumerate(zip(lengths, families, strict=True))
        ]

    def _prompt(self, number: int, length: int, family: int) -> Prompt:
        size = SYNTHETIC_BLOCK_TOKENS
        total = -(-length // size)
        shared = min(total, int(length * self.shared_share) // size)
        # Ids of the shared texts are even, those of private tails odd, so that they never meet.
        stride = 1 << 32
        blocks = [(family * stride + place) * 2 for place in range(shared)]
        blocks += [(number * stride + place) * 2 + 1 for place in range(shared, total)]
        return Prompt(0, length, tuple(blocks), size)
