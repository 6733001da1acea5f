"""One workload run: from its configuration to its summary."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.engines import vllm
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.workload.accelerator import AcceleratorLog
from kvprobe.workload.chunks import Inventory, Place, check_alignment, probe_direct
from kvprobe.workload.journal import EventLog, Flusher, TruthLog
from kvprobe.workload.prefill import DEFAULT_COST, PrefillCost, make_prefill
from kvprobe.workload.prompts import Prompt, Synthetic, chunk_key, read_mooncake
from kvprobe.workload.scheduler import Policy, Scheduler, Totals
from kvprobe.workload.shapes import ModelShape
from kvprobe.workload.threads import (
    LoadPool,
    LookupPool,
    Pool,
    PrefillThread,
    StorePool,
    UringLoadPool,
)

ENGINE_NAME = "kvprobe-workload"
SWITCH_SECONDS = 0.0005
"""Interpreter switch interval: a thread back from a system call gets on within this time."""

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it, of how much."""


@dataclass(frozen=True)
class Config:
    """What to run; the options of ``kvprobe workload run``."""

    root: str
    shape: ModelShape
    unit_tokens: int
    synthetic: Synthetic | None = None
    trace: str | None = None
    requests: int | None = None
    max_prompt_tokens: int | None = None
    reads_in_flight: int = 1
    direct: bool = True
    io: str = "sync"
    concurrency: int = 1
    slots: int | None = None
    rate: float | None = None
    time_scale: float | None = None
    prefill: str = "model"
    cost: PrefillCost = field(default_factory=lambda: PrefillCost.parse(DEFAULT_COST))
    restore_from_tokens: int = 0
    prefetch: bool = False
    lookup_every: bool = False
    device_cache_tokens: int = 0
    store: bool = True
    warm: str = "none"
    warm_only: bool = False
    drop_caches: bool = False
    capacity_bytes: int | None = None
    read_threads: int = 16
    write_threads: int = 4
    step_ns: int = 1_000_000
    emit_keys: bool = False
    seed: int = 0
    events: str | None = None
    truth: str | None = None
    accelerator_log: str | None = None
    clean: bool = False

    @property
    def unit_bytes(self) -> int:
        """Bytes of one chunk file."""
        return self.unit_tokens * self.shape.stored_bytes_per_token

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at their own times."""
        return self.rate is not None or self.time_scale is not None


def run_workload(config: Config, progress: Progress) -> dict[str, Any]:
    """Run to the end and return the summary; files stay unless ``config.clean``.

    Raises:
        KvprobeError: the configuration or the file system does not allow it.
    """
    prompts = _prompts(config)
    root = _prepare_root(config)
    base, fields = _namespace(config, root)
    place = Place(base, config.unit_bytes, config.direct)
    switch = sys.getswitchinterval()
    try:
        _write_config(base, fields)
        sys.setswitchinterval(SWITCH_SECONDS)
        return _Run(config, root, place, prompts, progress).summary()
    except OSError as error:
        where = error.filename or root
        raise KvprobeError(
            f"workload stopped at {where}: {error.strerror}",
            "free space, set --capacity-bytes, or use another --root",
            ExitCode.INCOMPLETE,
        ) from error
    finally:
        sys.setswitchinterval(switch)
        if config.clean:
            shutil.rmtree(base, ignore_errors=True)
            shutil.rmtree(f"{base}_r0", ignore_errors=True)


class _Run:
    """The parts of one run, started and stopped together."""

    def __init__(
        self, config: Config, root: str, place: Place, prompts: list[Prompt], progress: Progress
    ) -> None:
        self._config, self._place, self._prompts = config, place, prompts
        self._inventory = _inventory(place, config.capacity_bytes)
        self._prefill = make_prefill(config.prefill, config.cost)
        self._events = EventLog(config.events)
        self._truth = TruthLog(config.truth, _described(config, root))
        self._accelerator = AcceleratorLog(config.accelerator_log)
        self._events.engine(**_facts(config, root, self._prefill.label))
        self._scheduler = Scheduler(_policy(config), config.unit_bytes, self._events)
        self._report, self._seconds = progress, 0.0
        self._totals_of = len(prompts)

    def summary(self) -> dict[str, Any]:
        pools = self._pools()
        device = PrefillThread(self._prefill, self._events, self._accelerator, self._scheduler.post)
        self._scheduler.attach(*pools, device, self._progress)
        flusher = Flusher(self._events, self._truth)
        try:
            warmed = self._warm()
            if not self._config.warm_only:
                start_ns = time.monotonic_ns()
                self._scheduler.run(self._named())
                self._seconds = (time.monotonic_ns() - start_ns) / 1e9
        finally:
            for part in (*pools, device):
                part.stop()
            flusher.close()
            self._accelerator.close()
        return self._summary(pools, warmed)

    def _pools(self) -> tuple[Pool, Pool, Pool]:
        config = self._config
        rest = (self._place, self._truth, self._scheduler.post)
        lookups = LookupPool("lookup", 1, *rest)
        kind = UringLoadPool if config.io == "io_uring" else LoadPool
        load_rest = ("load", config.read_threads, self._place, self._truth, self._copied)
        loads = kind(self._inventory, config.reads_in_flight, *load_rest)
        stores = StorePool(self._inventory, "store", config.write_threads, *rest)
        return lookups, loads, stores

    def _copied(self, what: str, about: Any) -> None:
        """What was loaded is copied to the accelerator before the scheduler hears of it."""
        if what == "loaded":
            self._accelerator.copy(about.good(self._config.unit_bytes) * self._config.unit_bytes)
        self._scheduler.post(what, about)

    def _warm(self) -> int:
        config = self._config
        if config.warm != "none":
            keys = _warm_keys(self._prompts, config.unit_tokens, config.warm == "reused")
            _check_space(keys, self._inventory, self._place, config.capacity_bytes)
            self._truth.phase, self._totals_of = "warm", len(keys)
            self._report("storing chunks", 0, len(keys))
            self._scheduler.store_all(keys)
        stored = self._scheduler.totals.stored_chunks
        if config.drop_caches:
            _drop_caches(self._place.base)
        self._truth.phase, self._totals_of = "run", len(self._prompts)
        self._scheduler.totals.stored_chunks = 0
        return stored

    def _named(self) -> Iterator[tuple[str, Prompt]]:
        return ((f"req-{number}", prompt) for number, prompt in enumerate(self._prompts))

    def _progress(self, totals: Totals) -> None:
        warming = self._truth.phase == "warm"
        done = totals.stored_chunks if warming else totals.requests
        self._report("storing chunks" if warming else "requests", done, self._totals_of)

    def _summary(self, pools: tuple[Pool, ...], warmed: int) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for pool in pools:
            for io in pool.ios:
                counts += io.counts
                moved += io.bytes
        totals = self._scheduler.totals
        ttft = np.array(totals.ttft_ns, dtype=np.float64) / 1e6
        quantiles = [None] * 3 if not len(ttft) else np.percentile(ttft, [50, 90, 99]).tolist()
        tokens = {key: getattr(totals, f"{key}_tokens") for key in _TOKENS}
        return {
            "schema_version": 1,
            "requests": totals.requests,
            "seconds": self._seconds,
            "ttft_ms": dict(zip(("p50", "p90", "p99"), quantiles, strict=True)),
            "tokens": tokens,
            "operations": {kind: counts[kind] for kind in _KINDS},
            "bytes": {kind: moved[kind] for kind in ("read", "write")},
            "chunks": {
                "warmed": warmed,
                "stored": totals.stored_chunks,
                "kept": len(self._inventory),
            },
            "evicted_reads": totals.evicted_reads,
            "failed_reads": totals.failed_reads,
            "corrupt_reads": totals.corrupt_reads,
            "unit_bytes": self._place.unit_bytes,
            "prefill": self._prefill.label,
            "base": self._place.base,
        }


_TOKENS = ("prompt", "device", "found", "restored", "computed")
_KINDS = ("lookup", "open", "read", "write", "rename", "unlink")


def _prompts(config: Config) -> list[Prompt]:
    if config.trace is not None:
        prompts = list(read_mooncake(config.trace, config.requests))
    else:
        assert config.synthetic is not None
        prompts = config.synthetic.prompts()
    if not prompts:
        raise KvprobeError(f"no requests in {config.trace}", "use another trace")
    prompts = [prompt.cut(config.max_prompt_tokens) for prompt in prompts]
    if config.rate is not None:
        random = np.random.default_rng((config.seed, 1))
        gaps = random.exponential(1e9 / config.rate, len(prompts))
        times = np.cumsum(gaps).astype(np.int64).tolist()
        return [replace(p, arrival_ns=t) for p, t in zip(prompts, times, strict=True)]
    if config.time_scale is not None:
        scale = config.time_scale
        return [replace(p, arrival_ns=round(p.arrival_ns * scale)) for p in prompts]
    return prompts


def _prepare_root(config: Config) -> str:
    root = os.path.realpath(config.root)
    if not os.path.isdir(root):
        raise KvprobeError(f"no folder {config.root}", f"mkdir -p {config.root}")
    if config.direct:
        check_alignment(config.unit_tokens, config.shape.stored_bytes_per_token)
        probe_direct(root)
    return root


def _namespace(config: Config, root: str) -> tuple[str, dict[str, Any]]:
    shape = config.shape
    fields = vllm.config_fields(shape.name, config.unit_tokens, 1, shape.tp, shape.dtype)
    return vllm.base_path(root, fields), fields


def _write_config(base: str, fields: dict[str, Any]) -> None:
    os.makedirs(base, exist_ok=True)
    Path(base, "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")


def _inventory(place: Place, capacity_bytes: int | None) -> Inventory:
    """What earlier runs left; with a capacity, the oldest counts as the least recently used."""
    found = list(Path(f"{place.base}_r0").glob("*/*/*.bin"))
    if capacity_bytes is not None:
        found.sort(key=lambda path: path.stat().st_mtime_ns)
    return Inventory(place.unit_bytes, capacity_bytes, [path.stem for path in found])


def _policy(config: Config) -> Policy:
    slots = config.slots or (8 if config.open_loop else config.concurrency)
    return Policy(
        unit_tokens=config.unit_tokens,
        restore_from_tokens=config.restore_from_tokens,
        concurrency=None if config.open_loop else config.concurrency,
        slots=slots,
        prefetch=config.prefetch,
        step_ns=config.step_ns,
        device_cache_tokens=config.device_cache_tokens,
        lookup_every=config.lookup_every,
        emit_keys=config.emit_keys,
        store=config.store,
    )


def _facts(config: Config, root: str, prefill: str) -> dict[str, Any]:
    arithmetic = config.shape.arithmetic
    return {
        "name": ENGINE_NAME,
        "model": config.shape.name,
        "layout": "vllm",
        "unit_tokens": config.unit_tokens,
        "unit_bytes": config.unit_bytes,
        "bytes_per_token": config.shape.stored_bytes_per_token,
        "reads_in_flight": config.reads_in_flight,
        "direct": config.direct,
        "root": root,
        "prefetch": config.prefetch,
        "prefill": prefill,
        **({"arithmetic": asdict(arithmetic)} if arithmetic else {}),
    }


def _described(config: Config, root: str) -> dict[str, Any]:
    return {"config": asdict(config) | {"root": root}, "unit_bytes": config.unit_bytes}


def _warm_keys(prompts: list[Prompt], unit_tokens: int, reused_only: bool) -> list[str]:
    """Chunks of the prompts, each once, in order; or only those that two prompts have."""
    uses = Counter(chunk for prompt in prompts for chunk in prompt.chunks(unit_tokens))
    least = 2 if reused_only else 1
    return [chunk_key(chunk, unit_tokens) for chunk, count in uses.items() if count >= least]


def _check_space(
    keys: list[str], inventory: Inventory, place: Place, capacity_bytes: int | None
) -> None:
    need = sum(key not in inventory for key in keys) * place.unit_bytes
    if capacity_bytes is not None:
        need = min(need, capacity_bytes)
    room = os.statvfs(place.base)
    free = room.f_bavail * room.f_frsize
    if need > free:
        raise KvprobeError(
            f"{len(keys)} chunks x {place.unit_bytes} B need {need} B at {place.base}, "
            f"{free} B are free",
            "fewer --requests, smaller --max-prompt-tokens, or --capacity-bytes",
        )


def _drop_caches(folder: str) -> None:
    """Write dirty pages of this file system back and empty the page cache of the machine."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
    except OSError as error:
        raise KvprobeError(
            f"cannot drop the page cache: {error.strerror}", "run as root", ExitCode.UNSUPPORTED
        ) from None
