"""What a document says of a GPU, in words: for the text report and the dashboard alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvprobe import units
from kvprobe.digest import label, number, pick, rows
from kvprobe.gpu_table import THROTTLING, ClockEvent

BOUNDS = {
    "hbm_bound": "memory bandwidth",
    "compute_bound": "arithmetic",
    "pcie_bound": "PCIe",
    "starved": "waiting for a restore",
    "latency_bound": "latency",
    "idle": "idle",
    "unknown": "unknown",
}
"""What a GPU was held up by, by its name in the document."""

_THROTTLES = {str(event.name).lower() for event in ClockEvent if event & THROTTLING}
_ACTIVITY = (
    ("graphics_activity_share", "a kernel ran"),
    ("sm_activity_share", "SMs"),
    ("tensor_activity_share", "tensor cores"),
    ("sm_occupancy_share", "occupancy"),
)


def name_of(item: Any) -> tuple[str, str]:
    """Which device or MIG instance, and what it is."""
    facts, instance = pick(item, "facts"), number(item, "instance")
    what = label(facts, "name") or units.UNKNOWN
    if instance is not None:
        what = f"MIG instance {units.count(instance)} of {what}"
    return f"GPU {units.count(number(facts, 'index'))}", what


def describe(item: Any) -> Iterator[tuple[str, str]]:
    """All that is known of it, a name and a text a line."""
    facts = pick(item, "facts")
    if not any(True for _ in pick(item, "metrics") or ()):
        yield "samples", "none were recorded"
        return
    yield from _lines(item, facts)
    if pick(item, "follows_prefills") is False:
        yield "serves", "none of this engine's prefills: it works no more while they run"
    else:
        yield from _starvation(item)
        yield from _copy(item)
        yield from _windows(item)
        yield from _throttling(item, facts)
        if why := label(item, "why_no_prefills"):
            yield "prefills", f"not judged: {why}"
    if wrong := number(item, "senseless_values"):
        yield "left out", f"{units.count(wrong)} values of the driver that cannot be true"
    gaps = [f"{label(gap, 'what')}: {label(gap, 'why')}" for gap in rows(facts, "not_sampled")]
    if gaps:
        yield "not known", "; ".join(gaps)


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
            (key, way)
            for key, way in (
                (f"{bus}_rx_bytes_per_s", "to the GPU"),
                (f"{bus}_tx_bytes_per_s", "from the GPU"),
            )
            if _known(item, key)
        ]
        if ways:
            name = {"pcie": "PCIe", "nvlink": "NVLink"}[bus]
            said = [f"{way} {_spread(item, key, units.rate)}" for key, way in ways]
            yield name, f"{'; '.join(said)}; {_count(item, ways[0][0])}"
    yield from _state(item, facts)


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
    xids = Counter(units.count(number(xid, "number")) for xid in rows(item, "xids"))
    errors = [f"Xid {name}" + (f" ({n} times)" if n > 1 else "") for name, n in xids.items()][:8]
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


def _starvation(item: Any) -> Iterator[tuple[str, str]]:
    found = pick(item, "starvation")
    restores = number(found, "restores")
    if restores is None:
        return
    of = f"of {units.duration(number(found, 'covered_ns'))} sampled"
    count = f"n={units.count(number(found, 'n'))}, {units.count(restores)} restores"
    if not restores:
        idle = units.duration(number(found, "idle_ns"))
        yield "starved", f"no restore was in flight; idle {idle} {of}; {count}"
        return
    starved = _interval(found, ("starved_ns", "low_ns", "high_ns"), units.duration)
    restore, idle = (units.duration(number(found, key)) for key in ("restore_ns", "idle_ns"))
    yield (
        "starved",
        f"idle {starved} while a restore was in flight ({restore}); idle {idle} {of}; {count}",
    )


def _copy(item: Any) -> Iterator[tuple[str, str]]:
    copy = pick(item, "restore_copy")
    if number(copy, "received_bytes") is None:
        return
    received = _interval(copy, ("received_bytes", "low_bytes", "high_bytes"), units.size)
    text = f"{received} came over PCIe during {units.count(number(copy, 'restores'))} restores"
    text += f" of {units.size(number(copy, 'restored_bytes'))}"
    if (share := number(copy, "link_share")) is not None:
        text += f", {units.share(share)} of the link"
    yield "last leg", f"{text}; n={units.count(number(copy, 'n'))}"


def _windows(item: Any) -> Iterator[tuple[str, str]]:
    windows = rows(item, "windows")
    counts = Counter(label(window, "bound") or "unknown" for window in windows)
    if counts:
        said = [f"{BOUNDS.get(name, name)} {n}" for name, n in counts.most_common()]
        of = f"of {units.counted(len(windows), 'window', 'windows')} of a second or more"
        yield "mostly", f"{', '.join(said)} ({of})"


def _throttling(item: Any, facts: Any) -> Iterator[tuple[str, str]]:
    found = pick(item, "throttling")
    held, readings = number(found, "held"), number(found, "readings")
    if not held or not readings:
        return
    text = f"{units.share(held / readings)} of the readings in prefills (n={units.count(readings)})"
    slow, free = number(found, "clock_held_hz"), number(found, "clock_free_hz")
    if slow and free:
        text += f", at {slow / 1e6:,.0f} MHz instead of {free / 1e6:,.0f}"
    elif slow:
        most = number(facts, "sm_clock_hz")
        text += f", at {slow / 1e6:,.0f} MHz" + (f" of {most / 1e6:,.0f}" if most else "")
    if (longer := number(found, "slowdown")) is not None:
        n = units.count(number(found, "prefills_held"))
        text += f"; such prefills took {units.fixed(longer)} times as long (n={n})"
    yield "throttled", text


def _interval(
    node: Any, keys: tuple[str, str, str], show: Callable[[float | int | None], str]
) -> str:
    mid, low, high = (number(node, key) for key in keys)
    return units.interval(mid, low, high, show)


def _tokens(group: Any) -> str:
    low, high = number(group, "tokens_low"), number(group, "tokens_high")
    return units.count(low) if low == high else f"{units.count(low)}-{units.count(high)}"


def _share(group: Any, name: str) -> str:
    """Whole percents: a table has no room for more."""
    mid, low, high = (number(group, "shares", name, key) for key in ("mid", "low", "high"))
    if mid is None or low is None or high is None:
        return units.UNKNOWN
    return f"{mid * 100:.0f} % ({low * 100:.0f}{units.DASH}{high * 100:.0f})"


def _roofline(group: Any) -> str:
    least, took = number(group, "roofline_ns"), number(group, "prefill_ns")
    return units.UNKNOWN if least is None or not took else units.share(least / took)


PREFILLS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("computed", _tokens),
    ("prefills", lambda group: units.count(number(group, "prefills"))),
    ("time", lambda group: units.duration(number(group, "prefill_ns"))),
    ("memory", lambda group: _share(group, "hbm")),
    ("tensor", lambda group: _share(group, "compute")),
    ("roofline", _roofline),
    ("bound by", lambda group: BOUNDS.get(label(group, "bound") or "", "unknown")),
    ("n", lambda group: units.count(number(group, "samples"))),
)
"""Columns of a table of ``prefills``: title and value."""


def why_unknown(item: Any) -> str:
    """Why some of its prefills have no answer; empty where all have."""
    whys = {label(group, "why") for group in rows(item, "prefills")}
    return "; ".join(sorted(why for why in whys if why))
