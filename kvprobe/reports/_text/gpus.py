"""The GPUs: memory bandwidth first, then activity, PCIe, and what held them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType

from kvprobe import units
from kvprobe.digest import Document, label, number, pick, rows
from kvprobe.gpu_table import THROTTLING, ClockEvent
from kvprobe.reports._text.gpu_work import work
from kvprobe.reports._text.page import Page, heading, labelled

_THROTTLES = {str(event.name).lower() for event in ClockEvent if event & THROTTLING}

_ACTIVITY = (
    ("graphics_activity_share", "a kernel ran"),
    ("sm_activity_share", "SMs"),
    ("tensor_activity_share", "tensor cores"),
    ("sm_occupancy_share", "occupancy"),
)


def gpus(document: Document, page: Page) -> Iterator[RenderableType]:
    """One block a device or MIG instance; nothing where there is none."""
    for item in rows(document, "gpus"):
        facts = pick(item, "facts")
        instance = number(item, "instance")
        name = f"GPU {units.count(number(facts, 'index'))}"
        note = label(facts, "name") or units.UNKNOWN
        if instance is not None:
            note = f"MIG instance {units.count(instance)} of {note}"
        yield heading(name, note)
        yield labelled(_lines(item, facts))
        yield from work(item, page)


def _lines(item: Any, facts: Any) -> Iterator[tuple[str, str]]:
    yield "memory bandwidth", _bandwidth(item, facts)
    activity = [(key, name) for key, name in _ACTIVITY if _known(item, key)]
    if activity:
        said = [f"{name} {_spread(item, key, units.share)}" for key, name in activity]
        yield "activity", f"{'; '.join(said)}; {_count(item, activity[0][0])}"
    if _known(item, "kernel_time_share"):
        text = f"a kernel ran {_spread(item, 'kernel_time_share', units.share)} of the time"
        busy = _spread(item, "memory_busy_time_share", units.share)
        yield "busy time", f"{text}; memory in use {busy}, which is no bandwidth"
    for bus in ("pcie", "nvlink"):
        ways = [
            f"{way} {_spread(item, key, units.rate)}"
            for key, way in (
                (f"{bus}_rx_bytes_per_s", "to the GPU"),
                (f"{bus}_tx_bytes_per_s", "from the GPU"),
            )
            if _known(item, key)
        ]
        if ways:
            name = {"pcie": "PCIe", "nvlink": "NVLink"}[bus]
            yield name, f"{'; '.join(ways)}; {_count(item, f'{bus}_rx_bytes_per_s')}"
    yield from _state(item, facts)
    gaps = [f"{label(gap, 'what')}: {label(gap, 'why')}" for gap in rows(facts, "not_sampled")]
    if gaps:
        yield "not known", "; ".join(gaps)


def _bandwidth(item: Any, facts: Any) -> str:
    peak = units.rate(number(facts, "peak_bytes_per_s"))
    if not _known(item, "dram_bandwidth_share"):
        return f"unknown, peak {peak}"
    rate = units.rate(number(item, "dram_bytes_per_s"))
    mean, p95 = (number(item, "metrics", "dram_bandwidth_share", key) for key in ("mean", "p95"))
    text = f"{units.share(mean)} of the peak on average, p95 {units.share(p95)}"
    if number(item, "instance") is None:
        text += f" ({rate} of {peak})"
    return f"{text}; {_count(item, 'dram_bandwidth_share')}"


def _state(item: Any, facts: Any) -> Iterator[tuple[str, str]]:
    if _known(item, "power_watts"):
        limit = number(facts, "power_limit_watts")
        of = "" if limit is None else f" of {limit:,.0f} W"
        mean, most = (number(item, "metrics", "power_watts", key) for key in ("mean", "highest"))
        yield "power", f"{mean:,.0f} W on average, highest {most:,.0f} W{of}"
    if _known(item, "memory_used_bytes"):
        most = number(item, "metrics", "memory_used_bytes", "highest")
        total = units.size(number(facts, "memory_bytes"))
        yield "memory in use", f"at most {units.size(most)} of {total}"
    events = rows(item, "clock_events")
    if events:
        held = [
            f"{str(label(event, 'reason')).replace('_', ' ')} {units.share(number(event, 'share'))}"
            for event in events
            if label(event, "reason") in _THROTTLES
        ]
        n = units.count(number(events[0], "n"))
        yield "held back", f"{', '.join(held)} of the time (n={n})" if held else f"never (n={n})"
    errors = [f"Xid {units.count(number(xid, 'number'))}" for xid in rows(item, "xids")]
    for key in ("ecc_corrected", "ecc_uncorrected"):
        if count := number(item, key):
            errors.append(f"{count:,} memory errors {key.removeprefix('ecc_')}")
    if errors:
        yield "errors", ", ".join(errors)


def _known(item: Any, metric: str) -> bool:
    return number(item, "metrics", metric, "mean") is not None


def _spread(item: Any, metric: str, show: Callable[[float | int | None], str]) -> str:
    mean, p95 = (number(item, "metrics", metric, key) for key in ("mean", "p95"))
    return f"{show(mean)}, p95 {show(p95)}"


def _count(item: Any, metric: str) -> str:
    n = units.count(number(item, "metrics", metric, "n"))
    covered = number(item, "metrics", metric, "covered_ns")
    return f"n={n}" + ("" if covered is None else f" over {units.duration(covered)}")
