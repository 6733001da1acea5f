"""What the running kernel offers to a composed source: events, addresses, enumerators."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprobe.bpf import attach, libraries, tracefs
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import FILTERS, Hook, Source
from kvprobe.bpf.kernel_types import KernelTypes, is_loaded
from kvprobe.model import Missing

KALLSYMS = Path("/proc/kallsyms")
DISKS = Path("/sys/dev/block")
NO_BIT = 63
"""Value of a bit number that this kernel does not have: no flag word here is that wide."""


@dataclass(frozen=True)
class Offer:
    """What can be attached, the constants that come from the kernel, and what is not there.

    By probe: ``unused`` events, whose work another one does here, and ``gaps``, what the kernel
    lacks of its events and modules, by their names.
    """

    hooks: tuple[Hook, ...]
    constants: dict[tuple[str, str], int]
    missing: tuple[Missing, ...]
    unused: dict[str, frozenset[str]]
    gaps: dict[str, dict[str, Missing]]
    libraries: dict[str, tuple[libraries.Library, ...]]


def examine(source: Source, probes: Iterable[Probe], kernel: Btf) -> Offer:
    """Match the source's hooks and constants against this kernel.

    Args:
        source: what was composed.
        probes: the chosen ones; hooks of others are left out.
        kernel: its type information.
    """
    chosen = {probe.name: probe for probe in probes}
    types = KernelTypes(kernel, source.modules)
    hides = {what: effect for probe in chosen.values() for what, effect in probe.hides.items()}
    places = [hook for hook in source.hooks if hook.probe in (*chosen, FILTERS)]
    found = {p.name: libraries.find(p.library) for p in chosen.values() if p.library}
    existing = _existing(places, types, found)
    unused = {name: _unused(existing, probe) for name, probe in chosen.items()}
    gaps = {name: _gaps(places, existing, chosen[name], unused[name]) for name in chosen}
    missing = [gap for named in gaps.values() for gap in named.values()]
    missing += [
        _no_event(hook, "") for hook in places if hook.probe == FILTERS and hook not in existing
    ]
    wanted = [name for kind, name in source.constants if kind == "symbol"]
    symbols = addresses(wanted)
    missing += [
        Missing(name, "its address is not in /proc/kallsyms", hides[name])
        for name in wanted
        if not symbols.get(name) and name in hides
    ]
    constants = {("symbol", name): symbols.get(name, 0) for name in wanted}
    for kind, name in source.constants:
        if kind == "enumerator":
            value = types.enumerator(name)
            constants[kind, name] = NO_BIT if value is None else value
        elif kind == "arguments":
            constants[kind, name] = types.tracepoint_args(name) or 0
    hooks = tuple(h for h in existing if h.event not in unused.get(h.probe, ()))
    return Offer(hooks, constants, tuple(missing), unused, gaps, found)


def present(probes: Iterable[Probe]) -> tuple[tuple[Probe, ...], tuple[Missing, ...]]:
    """The probes that have something to see here, and a line for each of the others."""
    here, missing = [], []
    for probe in probes:
        gap = no_purpose(probe)
        if gap is None:
            here.append(probe)
        else:
            missing.append(gap)
    return tuple(here), tuple(missing)


def no_purpose(probe: Probe) -> Missing | None:
    """What this machine lacks so that a probe has nothing to see here; None: it may have."""
    if not is_loaded(probe.needs):
        return _no_module(probe.needs, probe)
    if probe.library and not libraries.find(probe.library):
        effect = probe.hides.get(probe.library, f"what probe {probe.name} sees there")
        return Missing(f"library {probe.library}", "it is not here", effect)
    return None


def addresses(names: Iterable[str]) -> dict[str, int]:
    """Addresses of kernel functions; a name that is absent or hidden from us is left out."""
    try:
        text = KALLSYMS.read_bytes()
    except OSError:
        return {}
    found = {}
    for name in names:
        at = text.find(f" {name}\n".encode())
        if at < 0:
            at = text.find(f" {name}\t[".encode())  # a module's
        line = text[text.rfind(b"\n", 0, at) + 1 : at].split() if at >= 0 else []
        if line and line[1] in (b"T", b"t") and int(line[0], 16):
            found[name] = int(line[0], 16)
    return found


def is_multipath(device: int) -> bool:
    """Whether a disk (dev_t) is the one that NVMe's native multipath shows for several paths."""
    place = DISKS / f"{device >> 20}:{device & 0xFFFFF}"
    return "/nvme-subsystem/" in os.path.realpath(place)


def in_initial_pid_namespace() -> bool:
    """Whether our process ids are those that the kernel side sees."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False


def _existing(
    hooks: Iterable[Hook], types: KernelTypes, found: Mapping[str, Sequence[libraries.Library]]
) -> tuple[Hook, ...]:
    """Those whose event or function is there."""
    functions = attach.traceable({hook.event for hook in hooks if hook.is_function})
    exported = {
        (probe, f) for probe, files in found.items() for lib in files for f in lib.functions
    }
    return tuple(hook for hook in hooks if _is_there(hook, types, functions, exported))


def _is_there(
    hook: Hook, types: KernelTypes, functions: frozenset[str], exported: set[tuple[str, str]]
) -> bool:
    if hook.is_library:
        return (hook.probe, hook.event) in exported and attach.LIBRARY_EVENTS.is_dir()
    if not is_loaded(hook.module):
        return False  # it may be a place in the kernel that only matters where the module is
    if hook.is_function:
        return hook.event in functions
    if hook.kind == "raw":
        return types.tracepoint_args(hook.event) is not None
    return tracefs.tracepoint_id("syscalls", hook.label) is not None


def _unused(existing: Iterable[Hook], probe: Probe) -> frozenset[str]:
    """Events of a probe that are not needed here, because another one does their work."""
    there = {hook.event for hook in existing if hook.probe == probe.name}
    pairs = probe.instead.items()
    return frozenset(
        [substitute for event, substitute in pairs if event in there]
        + [event for event, substitute in pairs if event not in there and substitute in there]
    )


def _gaps(
    wanted: Iterable[Hook], existing: Iterable[Hook], probe: Probe, unused: frozenset[str]
) -> dict[str, Missing]:
    """What a probe lacks here and somebody may miss, by the name of the event or module."""
    there = {hook.event for hook in existing}
    expected = {*there, *probe.optional, *unused, *probe.instead.values()}
    found = {}
    for hook in wanted:
        if hook.probe != probe.name or hook.event in expected:
            continue
        if is_loaded(hook.module):
            found[hook.event] = _no_event(hook, probe.hides.get(hook.event, ""))
        elif hook.module in probe.hides:  # else there is no such transport, and nothing to miss
            found[hook.module] = _no_module(hook.module, probe)
    return found


def _no_event(hook: Hook, effect: str) -> Missing:
    if hook.is_library and attach.LIBRARY_EVENTS.is_dir():
        what, why = f"function {hook.event}", "this version of the library has no such function"
    elif hook.is_library:
        what, why = f"function {hook.event}", "this kernel has no probes in user space"
    elif not hook.is_function:
        what, why = f"tracepoint {hook.label}", "this kernel has no such event"
    elif attach.FUNCTION_EVENTS.is_dir():
        what, why = f"function {hook.event}", "it cannot be traced in this kernel"
    else:
        what, why = f"function {hook.event}", "this kernel has no function probes"
    return Missing(what, why, effect or f"what probe {hook.probe} sees there")


def _no_module(module: str, probe: Probe) -> Missing:
    effect = probe.hides.get(module, f"what probe {probe.name} sees there")
    return Missing(f"module {module}", "it is not loaded", effect)
