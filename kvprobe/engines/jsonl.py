"""Request events in kvprobe's own documented JSON lines (docs/engine-events.md).

Any engine, gateway or load generator can write them; ``kvprobe workload run`` does.
"""

from __future__ import annotations

from kvprobe import engines
from kvprobe.adapter import Engine, KVPath
from kvprobe.model import EngineFacts, EngineSetting

WORKLOAD = "kvprobe-workload"
"""The engine name that ``kvprobe workload run`` gives itself."""


def recognise(path: str) -> KVPath | None:
    """The KV key under any known engine's path scheme."""
    return engines.recognise(path)


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """The options of ``kvprobe workload run``, or the words of the engine that the events name."""
    if engine.name == WORKLOAD:
        return _translate_workload(knob, value, engine)
    known = engines.engines().get(engine.name)
    if known is not None and known.translate is not translate:
        return known.translate(knob, value, engine)
    return EngineSetting(None, None, f"kvprobe does not know the settings of {engine.name}")


def _translate_workload(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    how = "option of kvprobe workload run"
    if knob == "unit_bytes" and engine.bytes_per_token:
        tokens = max(1, round(value / engine.bytes_per_token))
        return EngineSetting("--unit-tokens", str(tokens), how + "; chunks must be stored again")
    if knob == "bytes_in_flight" and engine.unit_bytes:
        return EngineSetting("--reads-in-flight", str(max(1, value // engine.unit_bytes)), how)
    if knob == "prefetch_horizon":
        return EngineSetting("--prefetch", None, how if value > 0 else f"leave out this {how}")
    return EngineSetting(None, None, f"kvprobe workload run has no option for {knob}")


ENGINE = Engine(
    name="jsonl",
    summary="request events in kvprobe's JSON lines, files of any known engine",
    recognise=recognise,
    translate=translate,
    describes_files=False,
)
