"""Decide what to load for a request, and load it with the first loader that can."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvprobe.bpf import bcc_loader, core_loader, core_object, machine, trial
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import Source, compose
from kvprobe.bpf.loaded import Loaded, Plan
from kvprobe.bpf.roots import Root
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Filters, Missing

AUTO = "auto"
LOADERS = (AUTO, core_loader.NAME, bcc_loader.NAME)
_TRAFFIC_FILES = 65536


@dataclass(frozen=True)
class Prepared:
    """Loaded but not attached: what a session works with."""

    loaded: Loaded
    source: Source
    offer: machine.Offer
    probes: tuple[Probe, ...]
    """Those of the chosen probes that have something to see here."""
    missing: tuple[Missing, ...]
    why: str
    """Why ``auto`` did not take ``core``; empty where it did or was not asked."""


def prepare(
    probes: Sequence[Probe],
    filters: Filters,
    root: Root | None,
    loader: str,
    ring_bytes: int | None,
) -> Prepared:
    """Load the programs of these probes.

    Raises:
        KvprobeError: no right to use BPF, no such loader, or no loader works.
    """
    if loader not in LOADERS:
        raise KvprobeError(f"no loader {loader!r}", f"there are: {', '.join(LOADERS)}")
    _ensure_permitted()
    kernel = Btf.load()
    probes, absent = machine.present(probes)
    why = ""
    if loader != bcc_loader.NAME:
        try:
            source = core_object.source(plain=core_object.must_be_plain(kernel))
            offer = machine.examine(source, probes, kernel)
            plan = _plan(probes, filters, root, ring_bytes, offer)
            loaded = core_loader.load(source, plan)
            return Prepared(loaded, source, offer, probes, (*absent, *offer.missing), "")
        except KvprobeError as error:
            if loader == core_loader.NAME:
                raise
            why = error.message
    source = compose(probes, bcc=True)
    offer = machine.examine(source, probes, kernel)
    plan = _plan(probes, filters, root, ring_bytes, offer)
    try:
        loaded = bcc_loader.load(source, plan, kernel)
        return Prepared(loaded, source, offer, probes, (*absent, *offer.missing), why)
    except KvprobeError as error:
        if not why:
            raise
        raise KvprobeError(
            f"no loader works: core: {why}; bcc: {error.message}", error.hint, ExitCode.UNSUPPORTED
        ) from error


def _plan(
    probes: Sequence[Probe],
    filters: Filters,
    root: Root | None,
    ring_bytes: int | None,
    offer: machine.Offer,
) -> Plan:
    remember = bool(filters.tgids) and root is None
    settings = {
        "own_tgid": os.getpid(),
        "filter_tgids": bool(filters.tgids),
        "remember_files": remember,
        "device": filters.device or 0,
        "device_has_paths": bool(filters.device) and machine.is_multipath(filters.device or 0),
        "root_device": root.device if root else 0,
        "root_inode": root.inode if root else 0,
        "more_roots": bool(root and root.has_mounts),
        "min_latency_ns": filters.min_latency_ns,
        "o_direct": os.O_DIRECT,
        # Kernel addresses have their top bit set, columns of a frame are signed: this clears it.
        "secret": secrets.randbits(63) | 1 << 63,
    }
    entries = {probe.table: ring_bytes or probe.ring_bytes for probe in probes}
    return Plan(
        frozenset(hook.name for hook in offer.hooks),
        {**offer.constants, **{("config", name): int(value) for name, value in settings.items()}},
        {
            **entries,
            "traffic": _TRAFFIC_FILES if remember else 1,
            "roots": len(root.entries) if root else 1,
        },
    )


def _ensure_permitted() -> None:
    rights = trial.capabilities()
    if "SYS_ADMIN" not in rights and not {"BPF", "PERFMON"} <= rights:
        raise KvprobeError(
            "no right to load BPF programs",
            "run it as root: sudo kvprobe ...",
            ExitCode.UNSUPPORTED,
        )


def namespace_notice() -> tuple[Missing, ...]:
    """Rows carry process ids of the initial PID namespace; say so where ours is another."""
    if machine.in_initial_pid_namespace():
        return ()
    return (
        Missing(
            "the initial PID namespace",
            "kvprobe runs in a container's PID namespace",
            "process filters and process ids in rows are those of the host, not the container's",
            "run kvprobe on the host, or the container with --pid=host",
        ),
    )
