"""Whether the loaders work here, and which events of each probe exist here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from kvprobe import content
from kvprobe.bpf import bcc_loader, catalog, compose, core_loader, core_object, machine
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import Hook, Source
from kvprobe.bpf.features import (
    Answer,
    Feature,
    State,
    absent,
    degraded,
    has_rights,
    ok,
    unknown,
)
from kvprobe.bpf.loaded import Plan
from kvprobe.errors import KvprobeError

_TRIAL_RING_BYTES = 1 << 16
_BCC_LIBRARY = "libbcc.so.0"


@dataclass(frozen=True)
class ProbeState:
    """One probe and its places here. ``exists`` is None where only root can find out."""

    probe: Probe
    hooks: tuple[tuple[Hook, bool | None], ...]
    symbols: tuple[tuple[str, bool], ...]

    @property
    def attaches(self) -> bool:
        """Whether at least one of its events exists here, or may exist."""
        return any(exists is not False for _, exists in self.hooks)

    @property
    def missing(self) -> tuple[str, ...]:
        """Events and kernel functions that this kernel lacks, optional ones left out."""
        names = [hook.event for hook, exists in self.hooks if exists is False]
        names += [name for name, exists in self.symbols if not exists]
        return tuple(name for name in dict.fromkeys(names) if name not in self.probe.optional)


def probe_states(kernel: Btf) -> tuple[ProbeState, ...]:
    """Every probe of the content folder against this kernel.

    Raises:
        KvprobeError: a probe is malformed.
    """
    probes = catalog.choose(None)
    source = compose.compose(probes, bcc=True)
    offer = machine.examine(source, probes, kernel)
    return tuple(_state(probe, source, offer, kernel) for probe in probes)


def _state(probe: Probe, source: Source, offer: machine.Offer, kernel: Btf) -> ProbeState:
    may_look = has_rights()
    hooks = [hook for hook in source.hooks if hook.probe == probe.name]
    symbols = [name for kind, name in source.constants if kind == "symbol" and name in probe.hides]
    return ProbeState(
        probe,
        tuple(
            # Without rights tracefs is closed, which says nothing about its events.
            (hook, hook in offer.hooks or (False if may_look or hook.kind == "raw" else None))
            for hook in hooks
        ),
        tuple(
            (name, bool(offer.constants["symbol", name]) if may_look else kernel.has_function(name))
            for name in symbols
        ),
    )


def loader_features(states: Sequence[ProbeState]) -> tuple[Feature, ...]:
    """Whether each loader could load these probes; the cheaper one is really tried."""
    core, bcc = _core(states), _bcc()
    required = core[0] is State.ABSENT and bcc[0] is not State.OK
    return (
        Feature("loaders", core_loader.NAME, *core, required=required),
        Feature("loaders", bcc_loader.NAME, *bcc, required=required),
    )


def _core(states: Sequence[ProbeState]) -> Answer:
    slower = "probes are compiled at each start and cost about twice as much a request"
    try:
        composed = core_object.source()
        if not _object_fits(composed) and which(core_object.CLANG[0]) is None:
            return absent(
                "the compiled probes do not fit their sources", slower, "apt install clang"
            )
        if not has_rights():
            return unknown()
        existing = [hook.name for state in states for hook, exists in state.hooks if exists]
        if not _object_fits(composed):
            return ok("compiled by clang at the next start")
        core_loader.load(composed, _trial_plan(composed, existing)).close()
    except KvprobeError as error:
        return absent(error.message, slower, error.hint)
    return ok("the compiled probes load through libbpf")


def _trial_plan(source: Source, programs: Sequence[str]) -> Plan:
    rings = {item.name: _TRIAL_RING_BYTES for item in source.maps if item.kind == "RING"}
    return Plan(frozenset(programs), dict.fromkeys(source.constants, 0), rings)


def _object_fits(composed: Source) -> bool:
    path = content.directory("probes") / core_object.NAME
    try:
        return core_object.digest(composed.text).encode() in path.read_bytes()
    except OSError:
        return False


def _bcc() -> Answer:
    package = bcc_loader.DEBIAN_PACKAGES / "bcc"
    library = any(Path("/usr/lib").glob(f"*/{_BCC_LIBRARY}"))
    if is_compiler_collection(package) and library:
        return ok(f"{_version(package)} is installed; needs no kernel headers")
    why = "python3-bpfcc is not installed"
    other = find_spec("bcc")
    if other is not None and other.origin:
        place = Path(other.origin).parent
        if not is_compiler_collection(place):
            why += f"; the bcc at {place} is another project"
    return degraded(
        why, "no fallback where the compiled probes do not load", "apt install python3-bpfcc"
    )


def is_compiler_collection(package: Path) -> bool:
    """Whether a package called bcc is the BPF Compiler Collection."""
    return (package / "libbcc.py").is_file()


def _version(package: Path) -> str:
    try:
        return (package / "version.py").read_text().split("'")[1]
    except (OSError, IndexError):
        return "an unknown version"


def probe_features(states: Sequence[ProbeState]) -> tuple[Feature, ...]:
    """One feature per probe, and one for each event that it misses here."""
    blind = not any(state.attaches for state in states)
    return tuple(feature for state in states for feature in _probe_features(state, blind))


def _probe_features(state: ProbeState, blind: bool) -> list[Feature]:
    probe = state.probe
    known = [exists for hook, exists in state.hooks if hook.event not in probe.optional]
    found = sum(exists is True for exists in known)
    if not state.attaches:
        why = f"none of its {len(known)} events exists in this kernel"
        answer = absent(why, f"no table {probe.table}", "use a newer kernel")
    elif None in known:
        answer = unknown()
    elif state.missing:
        answer = degraded(f"{found} of its {len(known)} events exist", "", "")
    else:
        answer = ok(f"its {len(known)} events exist")
    features = [Feature("events", probe.name, *answer, required=blind)]
    if state.attaches:
        features += [
            Feature("events", name, *degraded("not in this kernel", probe.hides.get(name, ""), ""))
            for name in state.missing
        ]
    return features
