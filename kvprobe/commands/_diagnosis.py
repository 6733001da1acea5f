"""The findings of ``kvprobe doctor``: kernel, loaders, events, storage, engines, tools, GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shutil import which
from typing import NamedTuple

from kvprobe import engines
from kvprobe.adapter import RunningEngine
from kvprobe.bpf import attach, libraries, readiness
from kvprobe.bpf import features as kernel_features
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.features import Answer, Feature, State, absent, degraded, ok
from kvprobe.bpf.readiness import ProbeState
from kvprobe.commands._chain_text import queues_in_words
from kvprobe.commands._listening import running_engines
from kvprobe.errors import KvprobeError
from kvprobe.model import DeviceFacts, GpuFacts
from kvprobe.sources import devices, nvme
from kvprobe.sources.devices import PathStorage
from kvprobe.sources.processes import Environment, processes
from kvprobe.sources.topology import Layer, chain_of
from kvprobe.units import rate, size

_TABLES = {
    "block": "block requests",
    "ops": "reads and writes of the engine",
    "lookups": "file lookups",
}
"""Tables in words; one that is not named here goes by its own name."""
_FILES_LOOKED_AT = 4096
"""A cache can hold millions of files; so many names are enough to recognise it."""
_CUFILE = "libcufile.so"
_NVIDIA_FS = Path("driver/nvidia-fs/stats")


@dataclass(frozen=True)
class Diagnosis:
    """Everything found, whether a capture is possible, and both in a sentence.

    ``chain`` is what serves the path that was asked for.
    """

    features: tuple[Feature, ...]
    capture_possible: bool
    shows: tuple[str, ...]
    summary: str
    chain: Layer | None = None
    engines: tuple[RunningEngine, ...] = ()


def diagnose(path: str | None) -> Diagnosis:
    """Look at this machine, and at what serves ``path``.

    Raises:
        KvprobeError: the path does not exist.
    """
    storage = storage_features(path)  # first: a mistyped path should cost nobody a second
    chain = None if path is None else chain_of(path)
    kernel = kernel_features.survey()
    running = _Running.here()
    states, broken = _probe_states()
    features = (
        *kernel,
        *readiness.loader_features(states),
        *readiness.probe_features(states),
        *broken,
        *storage,
        *nvme_features(),
        *engine_features(path if path and os.path.isdir(path) else None, running),
        *tool_features(),
        *gpu_features(),
        gpu_direct_feature(),
    )
    stopping = [feature for feature in features if feature.stops_capture]
    tables = dict.fromkeys(s.probe.table for s in states if s.attaches)
    shows = tuple(_TABLES.get(table, table) for table in tables)
    summary = _impossible(stopping) if stopping else _possible(features, shows)
    shown = () if stopping else shows
    return Diagnosis(features, not stopping, shown, summary, chain, running.engines)


def _probe_states() -> tuple[tuple[ProbeState, ...], tuple[Feature, ...]]:
    """The probes against this kernel; a probe that cannot be read is a feature of its own."""
    try:
        return readiness.probe_states(Btf.load()), ()
    except KvprobeError as error:
        answer = absent(error.message, "no capture", error.hint)
        return (), (Feature("events", "probes", *answer, required=True),)


def _possible(features: tuple[Feature, ...], shows: tuple[str, ...]) -> str:
    less = [f.name for f in features if f.effect and f.state in (State.DEGRADED, State.ABSENT)]
    text = f"A capture here shows {_listed(shows)}"
    return f"{text}, but less than everything: see {_listed(tuple(less))}." if less else f"{text}."


def _impossible(stopping: list[Feature]) -> str:
    reasons = _listed(tuple(f"{feature.name} ({feature.why})" for feature in stopping))
    fixes = [feature.fix for feature in stopping if feature.fix]
    text = f"No capture is possible here because of {reasons}"
    return f"{text}; try: {fixes[0]}" if fixes else f"{text}."


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1] if words else "")))


# ---------------------------------------------------------------- storage


def storage_features(path: str | None) -> tuple[Feature, ...]:
    """The devices of this machine, or the one that serves ``path``.

    Raises:
        KvprobeError: the path does not exist.
    """
    if path is None:
        found = devices.devices()
        if not found:
            return (Feature("storage", "devices", *_no_device("no block device is visible")),)
        return tuple(Feature("storage", facts.name, *ok(describe(facts))) for facts in found)
    return tuple(_path_features(devices.storage_of(path)))


def _path_features(storage: PathStorage) -> Iterator[Feature]:
    if storage.filesystem:
        where = f"{storage.filesystem} mounted at {storage.mount_point}"
        yield Feature("storage", "file system", *ok(where))
    if storage.device is None:
        yield Feature("storage", "device", *_no_device(storage.why))
        return
    facts = storage.device
    place = f"partition {storage.partition}, " if storage.partition else ""
    yield Feature("storage", facts.name, *ok(f"{place}{describe(facts)}"))
    if paths := nvme.paths_of_head(facts.name):
        text = f"requests have the numbers of its {len(paths)} paths: {', '.join(paths)}"
        yield Feature("storage", "paths", *ok(text))
    twice = "a request has a row on each of them; filter by device"
    if storage.backing_file:
        yield Feature(
            "storage", "layers", *degraded(f"loop device on {storage.backing_file}", twice, "")
        )
    if storage.below:
        names = ", ".join(storage.below)
        yield Feature(
            "storage", "layers", *degraded(f"{facts.name} is stacked on {names}", twice, "")
        )


def nvme_features(sysfs: Path = devices.SYSFS) -> tuple[Feature, ...]:
    """One line per NVMe controller; a path that is not live is worth a look."""
    joined = ", joined by native multipath" if nvme.native_multipath(sysfs) else ""
    features = []
    for found in nvme.controllers(sysfs):
        queues = f", {queues_in_words(found.io_queues)}" if found.io_queues is not None else ""
        text = f"nvme {found.transport} {nvme.short_address(found.address)}".rstrip()
        text += f", {found.state or 'unknown state'}{queues}{joined}"
        answer = ok(text)
        if found.state not in (None, "live"):
            answer = degraded(text, "nothing arrives over this path", "nvme list-subsys")
        features.append(Feature("storage", found.name, *answer))
    return tuple(features)


def _no_device(why: str) -> Answer:
    return degraded(why, "no block requests for this path, only reads and writes of the engine", "")


def describe(facts: DeviceFacts, sysfs: Path = devices.SYSFS) -> str:
    """One line on a device: transport, size, scheduler, limits, where it is mounted.

    A multipath disk has no queue of its own, whatever its files say: its paths have.
    """
    has_queue = not nvme.is_head(facts.name, sysfs)
    spinning = facts.rotational and facts.transport in ("sata", "unknown")
    largest, ahead = facts.max_request_bytes, facts.read_ahead_bytes
    words = [
        facts.transport + (" (rotating)" if spinning else ""),
        size(facts.size_bytes),
        f"scheduler {facts.scheduler}" if facts.scheduler and has_queue else "",
        f"nr_requests {facts.nr_requests}" if facts.nr_requests and has_queue else "",
        f"largest request {size(largest)}" if largest else "",
        f"read-ahead {size(ahead)}" if ahead is not None else "",
        f"mounted at {', '.join(facts.mounts)}" if facts.mounts else "not mounted",
    ]
    return ", ".join(word for word in words if word)


# ---------------------------------------------------------------- engines


class _Running(NamedTuple):
    """What runs here; of the processes in ``hidden`` the environment cannot be read."""

    engines: tuple[RunningEngine, ...]
    problems: tuple[str, ...]
    hidden: frozenset[int]

    @classmethod
    def here(cls) -> _Running:
        table = list(processes())
        environments = {process.pid: process.environment for process in table}
        found, problems = running_engines(table)
        hidden = (
            each.pid
            for each in found
            if isinstance(of := environments[each.pid], Environment) and not of.is_readable
        )
        return cls(found, problems, frozenset(hidden))


def engine_features(path: str | None, running: _Running | None = None) -> tuple[Feature, ...]:
    """Engines that run here, how each is heard, and whose files are below ``path``."""
    found, problems, hidden = running or _Running.here()
    looked_at, recognised = recognise_files(path) if path else (0, {})
    features: list[Feature] = []
    for each in found:
        features += _running_features(each)
        if each.pid in hidden:
            why, effect = "its environment is hidden", "folders and signals may be others"
            features.append(Feature("engine", each.engine, *degraded(why, effect, "")))
    for name, count in recognised.items():
        words = f"{count} of {looked_at} files below {path} are its KV cache"
        features.append(Feature("engine", name, *ok(words)))
    for problem in problems:
        effect = "its folders and signals are not found"
        features.append(Feature("engine", "options", *degraded(problem, effect, "")))
    return tuple(features) or (Feature("engine", "process", *_no_engine(path, looked_at)),)


def _running_features(running: RunningEngine) -> Iterator[Feature]:
    """What runs, where its KV cache is, what kvprobe reads of it, and what to add."""
    name = running.engine
    yield Feature("engine", name, *ok(f"process {running.pid}: {running.shape}"))
    for root in running.roots:
        yield Feature("engine", name, *ok(f"KV cache in {root}, {_served_by(root)}"))
    if running.signals:
        heard = ", ".join(map(str, running.signals))
        yield Feature("engine", name, *ok(f"capture reads {heard}"))
    else:
        effect = "storage can be shown, but not which request it served"
        yield Feature("engine", name, *degraded("kvprobe can read nothing of it", effect, ""))
    for advice in running.advice:
        fix, _, gain = advice.partition(": ")
        yield Feature("engine", name, *degraded("could tell more", gain, fix))


def _served_by(root: str) -> str:
    if root.startswith("/proc/"):
        return "inside its container"
    try:
        storage = devices.storage_of(root)
    except KvprobeError:
        return "which is not there yet"
    return f"on {storage.device.name}" if storage.device else storage.why


def _no_engine(path: str | None, looked_at: int) -> Answer:
    known = [name for name, engine in engines.engines().items() if engine.detect]
    why = f"none is running (known: {', '.join(known)})"
    if path:
        why += f", and none of the {looked_at} files below {path} is KV cache"
    return degraded(
        why,
        "storage can be shown, but not which request it served",
        "start the engine, or try: kvprobe workload run",
    )


def recognise_files(path: str) -> tuple[int, dict[str, int]]:
    """How many files below a folder were looked at, and how many belong to each engine."""
    looked_at = 0
    found: dict[str, int] = {}
    for file in islice(_files_below(path), _FILES_LOOKED_AT):
        looked_at += 1
        if owner := engines.owner(file):
            found[owner[0]] = found.get(owner[0], 0) + 1
    return looked_at, found


def _files_below(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)


# ---------------------------------------------------------------- tools and GPU


def tool_features() -> tuple[Feature, ...]:
    """Programs that some verbs run."""
    if which("fio"):
        return (Feature("tools", "fio", *ok("is installed")),)
    effect = "kvprobe sweep cannot measure what the device could do"
    return (Feature("tools", "fio", *degraded("is not installed", effect, "apt install fio")),)


def gpu_features() -> tuple[Feature, ...]:
    """The NVIDIA devices: what is sampled of each, what is not and why; one line without any."""
    from kvprobe.sources.gpu import survey

    found = survey()
    if found.why_none is not None:
        effect = "the table gpu stays empty; storage and requests are shown all the same"
        return (Feature("GPU", "NVIDIA", *absent(found.why_none, effect, "")),)
    return tuple(_gpu_feature(gpu, found.driver) for gpu in found.gpus) + tuple(
        Feature("GPU", "NVIDIA", *degraded(note, "it is not sampled", "")) for note in found.notes
    )


def _gpu_feature(gpu: GpuFacts, driver: str | None) -> Feature:
    words = [
        gpu.name,
        size(gpu.memory_bytes) if gpu.memory_bytes else "",
        f"memory peak {rate(gpu.peak_bytes_per_s)}" if gpu.peak_bytes_per_s else "",
        f"16-bit peak {gpu.peak_flops_per_s / 1e12:.0f} TFLOPS" if gpu.peak_flops_per_s else "",
        f"driver {driver}" if driver else "",
        f"MIG with instances {', '.join(map(str, gpu.instances)) or 'none'}" if gpu.mig else "",
        "bandwidth and activity are sampled (GPM)" if gpu.gpm else "",
    ]
    text = ", ".join(word for word in words if word)
    if not gpu.not_sampled:
        return Feature("GPU", f"GPU {gpu.index}", *ok(text))
    gaps = "; ".join(
        f"{gap.what}: {gap.why}" + (f" ({gap.effect})" if gap.effect else "")
        for gap in gpu.not_sampled
    )
    fix = next((gap.fix for gap in gpu.not_sampled if gap.fix), "")
    return Feature("GPU", f"GPU {gpu.index}", *degraded(text, f"not sampled: {gaps}", fix))


def gpu_direct_feature(procfs: Path = libraries.PROCFS) -> Feature:
    """GPUDirect Storage: where the library is, whether its driver counts, what nobody would see."""
    return Feature("GPUDirect Storage", "cuFile", *_gpu_direct(procfs))


def _gpu_direct(procfs: Path) -> Answer:
    found = libraries.find(_CUFILE, procfs)
    text = devices.read_text(procfs / _NVIDIA_FS)
    driver = "nvidia-fs is not loaded" if text is None else "nvidia-fs is loaded"
    if not found:
        return ok(f"{_CUFILE} is not here, {driver}: nothing goes past the block layer this way")
    files = ", ".join(library.name for library in found)
    why = f"{files}; {driver}"
    if not attach.LIBRARY_EVENTS.is_dir():
        return degraded(
            f"{why}; this kernel has no probes in user space",
            "reads through cuFile are not seen",
            "",
        )
    if text is None:
        # Compatibility mode reads by system calls, the kernel's peer-to-peer DMA may not.
        return ok(f"{why}: reads have system calls, or the report says which bytes were not seen")
    if "readMiB=" in text or "readmb=" in text:
        return ok(f"{why} and counts: bytes past the block layer are told, not where they waited")
    return degraded(
        f"{why} and does not count",
        "of reads that the block layer does not see nothing tells by which path they came",
        "echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled",
    )
