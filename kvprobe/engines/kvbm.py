"""Dynamo's KV block manager (KVBM): its disk tier is one file of blocks for each worker.

The file is made in ``DYN_KVBM_DISK_CACHE_DIR`` and unlinked as soon as it is open; a block is at
its number times its size. Nothing says which request a block is read for. Read: the names in kvbm
1.6, and sources of 2025 and 2026.
"""

from __future__ import annotations

import os
import re

from kvprobe.adapter import Engine, KVPath, LogLine, Metrics, Process, RunningEngine, SignalPlace
from kvprobe.clock import Moment
from kvprobe.engines._options import address, integer, switched_on
from kvprobe.model import EngineFacts, EngineSetting

_FILE = re.compile(r"(dynamo-kvbm-disk-cache-[0-9A-Za-z]{6})(?: \(deleted\))?")
_METRICS_PORT = 6880
_TRANSFERS = 4
"""Transfers at once, by default (``DYN_KVBM_MAX_CONCURRENT_TRANSFERS``)."""
_ENGINE_MODULES = ("dynamo.vllm", "dynamo.trtllm")


def recognise(path: str) -> KVPath | None:
    """The name of a worker's file, which holds blocks of all prompts; None for other files."""
    match = _FILE.fullmatch(path.rpartition("/")[2])
    return KVPath(match[1], shared=True) if match else None


def detect(process: Process) -> RunningEngine | None:
    """An engine process with a disk tier of KVBM; the front end and the router have none."""
    environment = process.environment
    if not _runs_kvbm(process) or not any(
        environment.get(f"DYN_KVBM_DISK_CACHE_{size}", "0").strip() not in ("", "0")
        for size in ("GB", "OVERRIDE_NUM_BLOCKS")
    ):
        return None
    root = environment.get("DYN_KVBM_DISK_CACHE_DIR") or "/tmp"
    root = os.path.normpath(os.path.join(process.folder or "/", root))
    direct = "DYN_KVBM_DISK_DISABLE_O_DIRECT" not in environment
    size = environment.get("DYN_KVBM_DISK_CACHE_GB")
    port = integer(environment.get("DYN_KVBM_METRICS_PORT")) or _METRICS_PORT
    page = SignalPlace("metrics", f"http://{address(None, port)}/metrics")
    counts = switched_on(environment, "DYN_KVBM_METRICS")
    advice = "set DYN_KVBM_METRICS=true: blocks that it wrote to its disk tier and brought back"
    return RunningEngine(
        engine="kvbm",
        pid=process.pid,
        shape=f"disk tier of {size} GB" if size else "disk tier",
        roots=(root,),
        signals=(page,) if counts else (),
        advice=() if counts else (advice,),
        facts=EngineFacts("kvbm", direct=direct, root=root, prefetch=False),
    )


def _runs_kvbm(process: Process) -> bool:
    words = process.arguments
    program = words[0].rpartition("/")[2] if words else ""
    if process.name.startswith("VLLM::") or not program.startswith(("python", "vllm", "trtllm")):
        return False
    return any(word in _ENGINE_MODULES or "kvbm" in word for word in words)


def _created(match: re.Match[str], when: Moment | None) -> EngineFacts:
    return EngineFacts("kvbm", root=match[1].rpartition("/")[0] or "/")


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in KVBM's words."""
    if knob == "unit_bytes":
        return EngineSetting(
            None,
            None,
            "KVBM (1.6) stores the blocks of the engine: their size is the engine's own option "
            "(vLLM: --block-size)",
        )
    if knob == "bytes_in_flight":
        where = (
            f"in the environment, then restart; that many blocks in each of {_TRANSFERS} transfers "
            "at once (DYN_KVBM_MAX_CONCURRENT_TRANSFERS)"
        )
        blocks = value // engine.unit_bytes // _TRANSFERS if engine.unit_bytes else None
        known = None if blocks is None else str(max(1, blocks))
        where += "" if known else "; bytes of a block are unknown"
        return EngineSetting("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", known, where)
    if knob == "prefetch_horizon":
        return EngineSetting(
            None, None, "KVBM (1.6) brings blocks when the engine schedules; it has no prefetch"
        )
    return EngineSetting(None, None, f"KVBM has no setting for {knob}")


ENGINE = Engine(
    name="kvbm",
    summary="Dynamo's KV block manager: one unlinked file of blocks a worker",
    recognise=recognise,
    translate=translate,
    detect=detect,
    log_lines=(
        LogLine(
            "disk tier",
            "DiskStorage created: ",
            re.compile(r"DiskStorage created: fd=\d+, file=(/[^,]{1,4096}), size=\d+ bytes"),
            _created,
        ),
    ),
    metrics=Metrics(keep=re.compile(r"kvbm_(?!\w*_created$)")),
)
