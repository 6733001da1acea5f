r"""Mooncake Store's SSD offload: buckets of objects, or one file an object.

==================  =============================================================================
bucket (default)    ``ROOT/ID.bucket``: up to 500 objects of any prompts. ID is a number whose upper
                    bits are the second it was made (``ID >> 12``), or ``MILLISECONDS-SEQUENCE``.
                    ``ID.meta`` beside it is the list of its objects and no KV cache
file per key        ``ROOT/file_per_key_dir/X/Y/KEY``, X and Y of ``a`` to ``p``, in KEY ``_`` for
                    each of ``/\:*?"<>|``. In a folder of another name only the keys that vLLM and
                    SGLang make are known
offset allocator    ``ROOT/kv_cache.data``: a name that any program may use, so not recognised
==================  =============================================================================

Mooncake knows no requests: they are the inference engine's, whose signals go with this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kvprobe.adapter import Engine, KVPath, LogLine, Metrics, News, Process, RunningEngine
from kvprobe.adapter import SignalPlace as Place
from kvprobe.clock import Moment
from kvprobe.engines._options import Options, address, switched_on
from kvprobe.model import EngineFacts, EngineSetting

NAME = "mooncake"
RING_DEPTH = 32
"""Reads in an io_uring at once; fixed in the source."""

_NAME_MAX = 255
_SEQUENCE_BITS = 12
_SECONDS = range(1_500_000_000, 4_100_000_000)
"""When a bucket may have been made: 2017 to 2099."""
_BUCKET = re.compile(r"([1-9]\d{12,18})\.bucket|(([1-9]\d{12})-\d{1,9})\.bucket")
_HASHED_FOLDERS = re.compile(r"(?:.*/)?([^/]+)/[a-p]/[a-p]", re.DOTALL)
_FOLDER = "file_per_key_dir"
_KEYS = re.compile(
    r"[0-9a-f]{64}_(?:\d+_)?[kv]"
    r"|[^/]+@tp_rank_\d+@(?:pcp\d+@dcp\d+@)?pp_rank_\d+@(?:group_\d+@)?[0-9a-f]{16,64}"
)
_DEFAULT_ROOT = "/data/file_storage"
_MASTER_METRICS_PORT = 9003
_CLIENT_PORT = 9300
_PREFIX = "MOONCAKE_OFFLOAD_"


# ---------------------------------------------------------------- files


def recognise(path: str) -> KVPath | None:
    """A bucket, shared by prompts, or the file of one object; None for other files."""
    folder, _, name = path.rpartition("/")
    if not name or len(name) > _NAME_MAX:
        return None
    if name.endswith(".bucket"):
        return _bucket(name)
    if folder[-2:-1] != "/" or folder[-4:-3] != "/":
        return None
    hashed = _HASHED_FOLDERS.fullmatch(folder)
    if hashed and (hashed[1] == _FOLDER or _KEYS.fullmatch(name)):
        return KVPath(name)
    return None


def _bucket(name: str) -> KVPath | None:
    match = _BUCKET.fullmatch(name)
    if match is None:
        return None
    seconds = int(match[1]) >> _SEQUENCE_BITS if match[1] else int(match[3]) // 1000
    return KVPath(match[1] or match[2], shared=True) if seconds in _SECONDS else None


# ---------------------------------------------------------------- signals


def _ring(match: re.Match[str], written: Moment | None) -> News | None:
    return EngineFacts(NAME, reads_in_flight=int(match[1]), direct=True)


LOG_LINES = (
    LogLine(
        "io_uring",
        "[SharedUringRing] thread-local ring initialised",
        re.compile(r"thread-local ring initialised queue_depth=([1-9]\d{0,4})(?!\d)"),
        _ring,
    ),
)
METRICS = Metrics(
    re.compile(
        r"(?!.*_(?:bucket|created)$)"
        r"(?:mooncake_ssd_(?:read|write)_(?:bytes|ops|latency_us)"
        r"|mooncake_transfer_(?:get|put)_latency_"
        r"|file_cache_(?:hit_|nums_)|mem_cache_hit_|valid_get_nums_|total_get_nums_"
        r"|master_(?:allocated|total)_(?:file_)?(?:size_|capacity_)?bytes"
        r"|master_promotion_(?:in_flight|admitted_total|completed_|failed_total))"
    )
)


# ---------------------------------------------------------------- processes


def detect(process: Process) -> RunningEngine | None:
    """The master, a client of its own, or an engine whose client offloads in its process."""
    program = os.path.basename(process.arguments[0]) if process.arguments else ""
    script = os.path.basename(process.arguments[1]) if process.arguments[1:] else ""
    options = Options(process.arguments)
    if "mooncake_master" in (program, script):
        return _master(process, options)
    if "mooncake_client" in (program, script):
        return _client(process, options, _says_yes(options, "enable-offload"))
    is_engine = program.startswith(("python", "vllm", "sglang")) and not options.has("c")
    if is_engine and not process.name.startswith(("VLLM::", "sglang::")):
        environment = process.environment
        named = any(name.startswith(_PREFIX) for name in environment)
        if named or switched_on(environment, "MOONCAKE_ENABLE_SSD_OFFLOAD"):
            return _client(process, options, offloads=True, embedded=True)
    return None


def _master(process: Process, options: Options) -> RunningEngine:
    port = options.number("metrics-port") or _MASTER_METRICS_PORT
    at = address(options.text("metrics-host"), port)
    offloads = _says_yes(options, "enable-offload")
    return RunningEngine(
        engine=NAME,
        pid=process.pid,
        shape="master" if offloads else "master, no SSD offload",
        signals=(Place("metrics", f"http://{at}/metrics"),),
    )


def _client(
    process: Process, options: Options, offloads: bool, embedded: bool = False
) -> RunningEngine:
    environment = process.environment
    backend = environment.get(_PREFIX + "STORAGE_BACKEND_DESCRIPTOR", "bucket_storage_backend")
    backend = backend.removesuffix("_storage_backend")
    path = environment.get(_PREFIX + "FILE_STORAGE_PATH") or _DEFAULT_ROOT
    root = os.path.normpath(os.path.join(process.folder or "/", path)) if offloads else None
    ring = backend == "bucket" and switched_on(environment, _PREFIX + "USE_URING")
    signals, advice = [], []
    if _says_yes(options, "enable-http-server"):
        at = address(options.text("host"), options.number("http-port") or _CLIENT_PORT)
        signals.append(Place("metrics", f"http://{at}/metrics"))
    elif not embedded:
        advice.append(
            "add --enable_http_server=true to mooncake_client: bytes and time of its reads from SSD"
        )
    if process.log:
        signals.append(Place("log", process.log))
    if offloads and backend == "offset_allocator":
        advice.append(
            "offset_allocator_storage_backend keeps all in one kv_cache.data, which kvprobe cannot "
            f"tell from other programs' files: {_PREFIX}STORAGE_BACKEND_DESCRIPTOR="
            "bucket_storage_backend"
        )
    where = "client in an engine" if embedded else "client"
    return RunningEngine(
        engine=NAME,
        pid=process.pid,
        shape=f"{where}, {backend} storage" + (", io_uring" if ring else "")
        if offloads
        else f"{where}, no SSD offload",
        roots=(root,) if root else (),
        signals=tuple(signals),
        advice=tuple(advice),
        facts=_facts(backend, ring, root) if offloads else None,
    )


def _facts(backend: str, ring: bool, root: str | None) -> EngineFacts:
    known = backend in ("bucket", "file_per_key", "offset_allocator")
    return EngineFacts(
        NAME,
        reads_in_flight=(RING_DEPTH if ring else 1) if known else None,
        direct=ring if known else None,
        root=root,
    )


def _says_yes(options: Options, name: str) -> bool:
    """A flag as gflags reads it: ``--name`` and ``--name=true`` set it."""
    text = options.text(name)
    if text is None:
        return options.has(name)
    flag: Mapping[str, str] = {name: text}
    return text in ("t", "y") or switched_on(flag, name)


# ---------------------------------------------------------------- settings


def translate(knob: str, value: int, engine: EngineFacts) -> EngineSetting:
    """An engine-neutral knob in Mooncake's words (0.3.12 and 0.3.13 read)."""
    if knob == "unit_bytes":
        return EngineSetting(
            None,
            None,
            "an object of Mooncake is a block or page of the engine that stores it: set that there "
            "(vLLM --block-size, SGLang --page-size), then restart. "
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES (256 MiB) only says how many go in one file",
        )
    if knob == "bytes_in_flight":
        return EngineSetting(
            "MOONCAKE_OFFLOAD_USE_URING",
            "true" if value > (engine.unit_bytes or 0) else "false",
            "environment of the client, then restart; bucket_storage_backend reads up to "
            f"{RING_DEPTH} objects of a bucket at once then, past the page cache. {RING_DEPTH} is "
            "fixed in the source (0.3.13), whatever is asked for. Otherwise, and with the other "
            "backends, one object is read at a time. Needs RLIMIT_MEMLOCK of "
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES for fixed buffers",
        )
    if knob == "prefetch_horizon":
        return EngineSetting(
            None,
            None,
            "Mooncake (0.3.13) does not know which requests wait, so that it cannot restore for "
            "them ahead; "
            "mooncake_master --promotion_on_hit=true brings objects back to memory that were read "
            "from SSD twice (--promotion_admission_threshold 2, --promotion_max_per_heartbeat 1)",
        )
    return EngineSetting(None, None, f"Mooncake has no setting for {knob}")


ENGINE = Engine(
    name=NAME,
    summary="Mooncake Store on SSD: buckets of objects, or one file an object",
    recognise=recognise,
    translate=translate,
    detect=detect,
    log_lines=LOG_LINES,
    metrics=METRICS,
)
