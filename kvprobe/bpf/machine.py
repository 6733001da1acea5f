"""What the running kernel offers to a composed source: events, addresses, enumerators."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvprobe.bpf import tracefs
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import Hook, Source
from kvprobe.model import Missing

KALLSYMS = Path("/proc/kallsyms")
NO_BIT = 63
"""Value of a bit number that this kernel does not have: no flag word here is that wide."""


@dataclass(frozen=True)
class Offer:
    """What can be attached, the constants that come from the kernel, and what is not there."""

    hooks: tuple[Hook, ...]
    constants: dict[tuple[str, str], int]
    missing: tuple[Missing, ...]


def examine(source: Source, probes: Iterable[Probe], kernel: Btf) -> Offer:
    """Match the source's hooks and constants against this kernel.

    Args:
        source: what was composed.
        probes: the chosen ones; hooks of others are left out.
        kernel: its type information.
    """
    chosen = {probe.name: probe for probe in probes}
    hides = {what: effect for probe in chosen.values() for what, effect in probe.hides.items()}
    optional = {event for probe in chosen.values() for event in probe.optional}
    hooks, missing = [], []
    for hook in source.hooks:
        if hook.probe in chosen or hook.probe == "filters":
            if _has_event(hook, kernel):
                hooks.append(hook)
            elif hook.event not in optional:
                missing.append(_no_event(hook, hides))
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
            value = kernel.enumerator(name)
            constants[kind, name] = NO_BIT if value is None else value
        elif kind == "arguments":
            constants[kind, name] = kernel.tracepoint_args(name) or 0
    return Offer(tuple(hooks), constants, tuple(missing))


def addresses(names: Iterable[str]) -> dict[str, int]:
    """Addresses of kernel functions; a name that is absent or hidden from us is left out."""
    try:
        text = KALLSYMS.read_bytes()
    except OSError:
        return {}
    found = {}
    for name in names:
        at = text.find(f" {name}\n".encode())
        line = text[text.rfind(b"\n", 0, at) + 1 : at].split() if at >= 0 else []
        if line and line[1] in (b"T", b"t") and int(line[0], 16):
            found[name] = int(line[0], 16)
    return found


def in_initial_pid_namespace() -> bool:
    """Whether our process ids are those that the kernel side sees."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False


def _has_event(hook: Hook, kernel: Btf) -> bool:
    if hook.kind == "raw":
        return kernel.tracepoint_args(hook.event) is not None
    return tracefs.tracepoint_id("syscalls", hook.label) is not None


def _no_event(hook: Hook, hides: dict[str, str]) -> Missing:
    effect = hides.get(hook.event, f"what probe {hook.probe} sees there")
    return Missing(f"tracepoint {hook.label}", "this kernel has no such event", effect)
