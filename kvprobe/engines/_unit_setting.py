"""A unit of so many bytes in an engine that counts its unit in tokens."""

from __future__ import annotations

from kvprobe.model import EngineFacts, EngineSetting


def unit_setting(
    name: str, how: str, value: int, engine: EngineFacts, least_tokens: int
) -> EngineSetting:
    """The setting ``name`` for units of ``value`` bytes, in tokens.

    A multiple of the unit in use, which is one that the engine takes; where that is not known, of
    ``least_tokens``.
    """
    if engine.unit_tokens and engine.unit_bytes:
        tokens = engine.unit_tokens * max(1, round(value / engine.unit_bytes))
    elif engine.bytes_per_token:
        whole = value // engine.bytes_per_token // least_tokens * least_tokens
        tokens = max(least_tokens, whole)
    else:
        return EngineSetting(name, None, how + "; bytes a token are unknown")
    return EngineSetting(name, str(tokens), how)
