"""The report document: the contract that reports, the dashboard and other tools build on.

Plain JSON types; unknown is None. Adding a field is allowed, changing a meaning raises
``SCHEMA_VERSION``. Both the reports and the dashboard show this document and compute nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvprobe import content, engines, notes
from kvprobe.adapter import Engine
from kvprobe.capture.manifest import Manifest
from kvprobe.capture.tables import Tables
from kvprobe.correlator import Account, Ledger, correlate
from kvprobe.correlator.ledger import BreakEven, DeviceAccount, Latency, Load, PathAccount
from kvprobe.correlator.timeline import timeline
from kvprobe.engines.jsonl import WORKLOAD
from kvprobe.findings import detect_all
from kvprobe.model import (
    EngineFacts,
    EngineSetting,
    Facts,
    Finding,
    Frame,
    Interval,
    Loss,
    Proposal,
    ServiceCell,
)

SCHEMA_VERSION = 1

Document = dict[str, Any]


def build(tables: Tables, sweeps: Sequence[ServiceCell] = ()) -> Document:
    """Correlate a window and say what was found and what to change.

    Args:
        tables: a capture or a live window.
        sweeps: cells of active measurements of the same storage, for the tuners.

    Raises:
        KvprobeError: a table is damaged, or a tuner file cannot be loaded.
    """
    ledger = correlate(tables)
    findings = detect_all(ledger)
    facts = facts_of(ledger, tables.manifest, sweeps)
    document = assemble(ledger, tables.manifest, findings, propose(findings, facts))
    _add_timelines(document, ledger, tables)
    return document


def facts_of(ledger: Ledger, manifest: Manifest, sweeps: Sequence[ServiceCell] = ()) -> Facts:
    """What tuners may reason from; sweep cells come first, as they were measured on purpose."""
    device = ledger.devices[0] if ledger.devices else None
    cells = (*sweeps, *(device.surface if device else ()))
    waits = [
        a.first_read_ns - a.arrival_ns
        for a in ledger.accounts
        if a.first_read_ns is not None and a.arrival_ns >= 0
    ]
    return Facts(
        engine=ledger.engine,
        # Under native multipath settings are made at the disk that is mounted.
        device=(device.head_facts or device.facts) if device else None,
        restore=ledger.restore,
        surface=cells,
        settings=_settings(manifest.engine_name, ledger.engine),
        break_even_tokens=ledger.break_even.tokens,
        queue_ns_per_restore=_spread(waits),
        recompute_ns_per_token=_marginal_recompute_ns(ledger),
        paths=tuple(d.path.facts for d in ledger.kv_devices if d.path),
        queue_entries=_queue_entries(ledger.knobs),
    )


def _queue_entries(knobs: Frame) -> dict[int, int]:
    """The queue size that each controller connected with, from the settings of the recording."""
    if not knobs:
        return {}
    found = {}
    for name, subject, value in zip(knobs["name"], knobs["subject"], knobs["value"], strict=True):
        number = str(subject).removeprefix("nvme")
        if name == "queue_size" and number.isdecimal() and str(value).isdecimal():
            found[int(number)] = int(value)
    return found


def _marginal_recompute_ns(ledger: Ledger) -> float | None:
    """Cost of one more token to prefill behind a typical restored prefix.

    The derivative of a + b*new + c*new*(context + new/2) by ``new``, context shrinking with it
    (a token that is computed was not restored): b + c*context.
    """
    coefficients = ledger.break_even.recompute_coefficients
    restored = [a.storage_hit_tokens for a in ledger.accounts if a.storage_hit_tokens]
    if coefficients is None or not restored:
        return None
    _, per_token, per_pair = coefficients
    return (per_token + per_pair * statistics.median(restored)) * 1e9


KNOBS = ("unit_bytes", "bytes_in_flight", "prefetch_horizon")
"""Engine-neutral knobs that an adapter can put in its engine's words."""


def _settings(
    adapter_name: str | None, facts: EngineFacts | None
) -> dict[str, Callable[[int], EngineSetting]]:
    if facts is None:
        return {}
    known = engines.engines()
    # Without an adapter's name the signal was the common one, in which an engine names itself.
    adapter = known.get(adapter_name or facts.name)
    if adapter is None and facts.name == WORKLOAD:
        adapter = known["jsonl"]
    if adapter is None:
        return {}
    return {knob: _setting(adapter, knob, facts) for knob in KNOBS}


def _setting(adapter: Engine, knob: str, facts: EngineFacts) -> Callable[[int], EngineSetting]:
    def in_its_words(value: int) -> EngineSetting:
        return adapter.translate(knob, value, facts)

    return in_its_words


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """Ask every tuner that answers one of the findings."""
    slugs = {finding.slug for finding in findings}
    proposals: list[Proposal] = []
    for tuner in content.tuners().values():
        if slugs & set(tuner.answers):
            answered = [f for f in findings if f.slug in tuner.answers]
            proposals += tuner.propose(answered, facts)
    return proposals


def assemble(
    ledger: Ledger, manifest: Manifest, findings: Sequence[Finding], proposals: Sequence[Proposal]
) -> Document:
    """Put everything in the document's shape."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "capture": _capture(manifest, ledger),
        "losses": {name: asdict(loss) for name, loss in sorted(ledger.losses.items())},
        "missing": [asdict(m) for m in manifest.missing],
        "cost": _cost(manifest),
        "requests": [_request(account) for account in ledger.accounts],
        "attributed_bytes": dict(ledger.attributed_bytes),
        "break_even": _break_even(ledger.break_even),
        "read_ahead": asdict(ledger.read_ahead) if ledger.read_ahead else None,
        "devices": [_device(device) for device in ledger.devices],
        "gpus": [asdict(gpu) for gpu in ledger.gpus],
        "gds": asdict(ledger.gds) if ledger.gds else None,
        "findings": [asdict(finding) for finding in findings],
        "proposals": [asdict(proposal) for proposal in proposals],
    }
    clean: Document = _plain(document)
    return clean


def _capture(manifest: Manifest, ledger: Ledger) -> Document:
    return {
        "id": manifest.capture_id,
        "kvprobe": manifest.kvprobe,
        "start_wall": manifest.start_wall_ns,
        "start_ns": manifest.start_ns,
        "duration_ns": manifest.end_ns - manifest.start_ns,
        "complete": manifest.complete,
        "redacted": manifest.redacted,
        "host": manifest.host.hostname,
        "kernel": manifest.host.kernel,
        "loader": manifest.loader,
        "devices": [d.name for d in manifest.devices],
        "engine": asdict(manifest.engine) if manifest.engine else None,
        "signal": {"understood": manifest.signal_understood, "ignored": manifest.signal_ignored},
        "engine_totals": [asdict(total) for total in ledger.totals],
        "clock": asdict(manifest.clock),
        "gpu_driver": manifest.gpu and manifest.gpu.driver,
        "gpu_why_none": manifest.gpu and manifest.gpu.why_none,
        "notes": [
            *notes.outages(ledger),
            *manifest.notes,
            *notes.gpus(manifest.gpu, ledger),
            *notes.gpu_direct(ledger.gds),
            *notes.left_out(ledger),
            *notes.compared(ledger),
        ],
        "filters": asdict(manifest.filters),
    }


def _cost(manifest: Manifest) -> Document:
    """Own cost; shares are of one CPU core over the window."""
    programs = manifest.cost.programs
    runs = sum(p.runs for p in programs)
    run_ns = sum(p.run_ns for p in programs)
    wall = manifest.cost.wall_ns
    measured = manifest.cost.measured_ns or wall
    return {
        "probe_ns_per_event": run_ns / runs if runs else None,
        "probe_runs": runs,
        "probe_cpu_share": run_ns / measured if measured and programs else None,
        "agent_cpu_share": _ratio(manifest.cost.agent_cpu_ns, wall),
        "budget_share": manifest.budget_share,
        "programs": [asdict(p) for p in programs],
        "gpu_calls": [asdict(call) for call in manifest.gpu.calls] if manifest.gpu else [],
    }


def _request(account: Account) -> Document:
    gain, recompute = account.gain_ns, account.recompute_ns
    restore = account.restore
    return {
        "id": account.id,
        "t_arrival_ns": account.arrival_ns if account.arrival_ns >= 0 else None,
        "ttft_ns": account.ttft_ns,
        "uncertainty_ns": account.uncertainty_ns,
        "tokens": {
            "prompt": account.prompt_tokens,
            "device_hit": account.device_hit_tokens,
            "host_hit": account.host_hit_tokens,
            "storage_hit": account.storage_hit_tokens,
            "computed": account.computed_tokens,
            "stored": account.stored_tokens,
        },
        "spans": asdict(account.spans) if account.spans else None,
        "restore": asdict(restore) if restore else None,
        "recompute": _estimate(recompute),
        "restore_estimate": _estimate(account.restore_estimate_ns),
        "prefill": asdict(account.prefill) if account.prefill else None,
        "verdict": str(account.verdict),
        "gain_ns": gain.mid if gain else None,
        "gain_low_ns": gain.low if gain else None,
        "gain_high_ns": gain.high if gain else None,
        "attribution": dict(account.attribution),
    }


def _estimate(interval: Interval | None) -> Document | None:
    if interval is None:
        return None
    return {
        "estimate_ns": interval.mid,
        "low_ns": interval.low,
        "high_ns": interval.high,
        "n": interval.n,
    }


def _break_even(found: BreakEven) -> Document:
    tokens = found.tokens
    return {
        "model": {
            "recompute_coefficients_s": found.recompute_coefficients,
            "recompute_n": found.recompute_n,
            "recompute_error": found.recompute_error,
            "restore_coefficients_s": found.restore_coefficients,
            "restore_n": found.restore_n,
        },
        "curve": [
            {
                "tokens": point.tokens,
                "restore_ns": point.restore.mid,
                "restore_low_ns": point.restore.low,
                "restore_high_ns": point.restore.high,
                "recompute_ns": point.recompute.mid,
                "recompute_low_ns": point.recompute.low,
                "recompute_high_ns": point.recompute.high,
            }
            for point in found.curve
        ],
        "tokens": tokens.mid if tokens else None,
        "tokens_low": tokens.low if tokens else None,
        "tokens_high": tokens.high if tokens else None,
        "n": tokens.n if tokens else min(found.recompute_n, found.restore_n),
        "note": found.note,
    }


def _device(device: DeviceAccount) -> Document:
    latency = device.read_latency_ns
    return {
        "name": device.facts.name,
        "transport": device.facts.transport,
        "facts": asdict(device.facts),
        "head": device.head,
        "path": _path(device.path),
        "load": _load(device.load) if device.load else None,
        "queues": [
            {
                "controller": queue.controller,
                "queue": queue.queue,
                **_load(queue.load),
                "queue_size": queue.queue_size,
                "waiting_depth": queue.waiting_depth,
                "idle_while_waiting_share": queue.idle_while_waiting_share,
                "full_while_waiting_share": queue.full_while_waiting_share,
                "found_full_share": queue.found_full_share,
            }
            for queue in device.queues
        ],
        "segments": [asdict(segment) for segment in device.segments],
        "counted_from": device.counted_from,
        "lost_share": device.lost_share,
        "depth": {
            "mean": device.mean_depth,
            "p99": device.p99_depth,
            "time_at_zero_share": device.time_at_zero_share,
        },
        "reads": device.reads,
        "read_bytes": device.read_bytes,
        "writes": device.writes,
        "write_bytes": device.write_bytes,
        "read_latency": {
            "median_ns": latency.mid if latency else None,
            "p5_ns": latency.low if latency else None,
            "p95_ns": latency.high if latency else None,
            "n": latency.n if latency else 0,
        },
        "surface": [asdict(cell) for cell in device.surface],
        "little_check": {"ratio": device.little_ratio, "n": device.little_n},
    }


def _path(path: PathAccount | None) -> Document | None:
    if path is None:
        return None
    events = asdict(path.events) if path.events else None
    outages = [{"start_ns": lost, "end_ns": back} for lost, back in path.outages]
    return {**asdict(path.facts), "names": path.names, "events": events, "outages": outages}


def _load(load: Load) -> Document:
    return {**asdict(load), "latency": _latency(load.latency)}


def _latency(latency: Latency | None) -> Document:
    unknown = {"median_ns": None, "p95_ns": None, "p99_ns": None, "n": 0}
    return asdict(latency) if latency else unknown


def _add_timelines(document: Document, ledger: Ledger, tables: Tables) -> None:
    """Give each device its course over the window, from the in-kernel sums."""
    depth, histogram = tables.frame("depth"), tables.frame("histogram")
    loss = ledger.losses.get("block", Loss())
    block = None if loss.lost or loss.thinned else tables.frame("block")
    for shown, device in zip(document["devices"], ledger.devices, strict=True):
        points = timeline(depth, histogram, device.numbers, block=block)
        shown["timeline"] = _plain([asdict(point) for point in points])


def _spread(values: Sequence[int]) -> Interval | None:
    """Median with the 5th and 95th percentile."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    low, mid, high = (ordered[round(q * last)] for q in (0.05, 0.5, 0.95))
    return Interval(mid, low, high, len(ordered))


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _plain(value: Any) -> Any:
    """JSON types only: tuples become lists, a float that is no number becomes None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
