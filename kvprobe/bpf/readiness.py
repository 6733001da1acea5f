"""Whether the loaders work here, and which events of each probe exist here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from kvprobe.bpf.kernel_types import is_loaded
from kvprobe.bpf.loaded import Plan
from kvprobe.errors import KvprobeError
from kvprobe.model import Missing

_TRIAL_RING_BYTES = 1 << 16
_BCC_LIBRARY = "libbcc.so.0"


@dataclass(frozen=True)
class ProbeState:
    """One probe and its places here. ``exists`` is None where only root can find out."""

    probe: Probe
    hooks: tuple[tuple[Hook, bool | None], ...]
    symbols: tuple[tuple[str, bool], ...]
    gaps: Mapping[str, Missing]
    """What is not here and somebody may miss, by the name of the event, function or module."""
    absent: Missing | None = None
    """The module or library without which there is nothing to see."""

    @property
    def attaches(self) -> bool:
        """Whether it has something to see here and one of its events exists, or may exist."""
        return self.has_purpose and any(exists is not False for _, exists in self.hooks)

    @property
    def has_purpose(self) -> bool:
        """Whether this machine has what the probe is about."""
        return self.absent is None

    @property
    def no_purpose(self) -> str:
        """Why this machine has nothing that the probe is about; empty where it has."""
        if self.absent is None:
            return ""
        reason = self.absent.effect.split(": ")[-1]
        return f"{self.absent.what} {self.absent.why.removeprefix('it ')}: {reason}"

    def is_idle(self, hook: Hook) -> bool:
        """Whether a module that is not loaded is why an event is not there or has no use."""
        return not self.has_purpose or not is_loaded(hook.module)

    @property
    def missing(self) -> tuple[str, ...]:
        """Events, functions and modules that this kernel lacks, expected ones left out."""
        symbols = (name for name, exists in self.symbols if not exists)
        return tuple(dict.fromkeys((*self.gaps, *symbols)))


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
    unused = offer.unused[probe.name]
    mine = [hook for hook in source.hooks if hook.probe == probe.name]
    hooks = [hook for hook in mine if hook.event not in unused]
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
        # Who may not try a function probe or read tracefs cannot say that it is missing.
        {
            name: gap
            for name, gap in offer.gaps[probe.name].items()
            if may_look or any(hook.event == name and hook.kind == "raw" for hook in hooks)
        },
        machine.no_purpose(probe),
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
        kernel = Btf.load()
        composed = core_object.source(plain=core_object.must_be_plain(kernel))
        name = core_object.name_of(composed)
        if not _object_fits(composed) and which(core_object.CLANG[0]) is None:
            return absent(
                "the compiled probes do not fit their sources", slower, "apt install clang"
            )
        if not has_rights():
            return unknown()
        if not _object_fits(composed):
            return ok(f"{name} is compiled by clang at the next start")
        offer = machine.examine(composed, [state.probe for state in states], kernel)
        core_loader.load(composed, _trial_plan(composed, offer)).close()
    except KvprobeError as error:
        return absent(error.message, slower, error.hint)
    why = ": this kernel has no bpf_rdonly_cast" if composed.plain else ""
    return ok(f"{name} loads through libbpf{why}")


def _trial_plan(source: Source, offer: machine.Offer) -> Plan:
    rings = {item.name: _TRIAL_RING_BYTES for item in source.maps if item.kind == "RING"}
    constants = {**dict.fromkeys(source.constants, 0), **offer.constants}
    return Plan(frozenset(hook.name for hook in offer.hooks), constants, rings)


def _object_fits(composed: Source) -> bool:
    path = content.directory("probes") / core_object.name_of(composed)
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
    places = {
        hook.label: exists for hook, exists in state.hooks if hook.event not in probe.optional
    }
    known = list(places.values())
    found = sum(exists is True for exists in known)
    if not state.has_purpose:
        return [Feature("events", probe.name, *ok(state.no_purpose))]
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
            Feature("events", name, *degraded(*_why_missing(state, name), ""))
            for name in state.missing
        ]
    return features


def _why_missing(state: ProbeState, name: str) -> tuple[str, str]:
    """Why something is not here and what is not seen without it."""
    gap = state.gaps.get(name)
    if gap is None:  # a function whose address is read, not traced
        return "not in this kernel", state.probe.hides.get(name, "")
    return gap.why, gap.effect
