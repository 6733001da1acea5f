"""Engine adapters, one file each: which paths are KV cache, and how settings are called."""

from __future__ import annotations

from functools import lru_cache

from kvprobe import registry
from kvprobe.adapter import Engine, KVPath


@lru_cache(maxsize=1)
def engines() -> dict[str, Engine]:
    """Every engine by name; a file in this folder that exports ``ENGINE`` is one."""
    return registry.load("kvprobe.engines", "ENGINE", Engine)


@lru_cache(maxsize=1 << 16)
def owner(path: str) -> tuple[str, KVPath] | None:
    """The name of the engine whose file ``path`` is, and its key; None for other files.

    An engine that only describes requests (``describes_files`` false) is not asked.
    """
    for name, engine in engines().items():
        if engine.describes_files and (found := engine.recognise(path)) is not None:
            return name, found
    return None


def recognise(path: str) -> KVPath | None:
    """The KV key of a path of any engine, or None. Cached: about a million paths a second."""
    found = owner(path)
    return found[1] if found else None
