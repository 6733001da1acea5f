"""How much of a trace an unbounded store could have restored."""

from __future__ import annotations

from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.workload.prompts import read_mooncake


def ideal_reuse(path: str, units: list[int], requests: int | None = None) -> list[dict[str, Any]]:
    """For each unit in tokens: prompt tokens, tokens that an earlier prompt had stored, chunks.

    A prompt reuses its leading chunks up to the first that no earlier prompt had; its last token
    is always computed. All times are ignored: a chunk is there as soon as its prompt was seen.

    Raises:
        KvprobeError: the trace cannot be read or is empty.
    """
    prompts = list(read_mooncake(path, requests))
    if not prompts:
        raise KvprobeError(f"no requests in {path}", "use another trace")
    total = sum(prompt.tokens for prompt in prompts)
    rows = []
    for unit in units:
        stored: set[tuple[int, int]] = set()
        reusable = 0
        for prompt in prompts:
            chunks = prompt.chunks(unit)
            usable = (prompt.tokens - 1) // unit
            hits = next((n for n, c in enumerate(chunks[:usable]) if c not in stored), usable)
            reusable += hits * unit
            stored.update(chunks)
        rows.append(
            {
                "unit_tokens": unit,
                "requests": len(prompts),
                "prompt_tokens": total,
                "reusable_tokens": reusable,
                "share": reusable / total,
                "distinct_chunks": len(stored),
            }
        )
    return rows
