"""Writes ``tests/data/sample_report.json``: a report document as a real, mixed capture gives it.

Seeded and standard library only, so that the file is the same everywhere. The figures follow a
simple node: a prefill of ``A + B*n + C*n*n/2`` seconds and a small device that reads one unit at a
time, with a slow phase in the middle. Restores of short prefixes lose, long ones win.

Run it to rewrite the file: ``python tests/reports/make_sample_report.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parents[1] / "data" / "sample_report.json"
REQUESTS = 211
UNIT_TOKENS, UNIT_BYTES = 16, 2 * 2**20
MS = 1_000_000
SECOND = 1_000_000_000
START_NS = 86_400_000_000_000 + 431
A, B, C = 31.0e-3, 0.42e-3, 2.1e-9
FIXED, PER_TOKEN = 212e-3, 0.28e-3


def recompute_seconds(tokens: int) -> float:
    """Prefill of a prefix, in seconds."""
    return A + B * tokens + C * tokens * tokens / 2


def split(total: int, weights: list[float]) -> list[int]:
    """Whole parts in these proportions that sum to ``total`` exactly."""
    whole = sum(weights)
    found = [int(total * weight / whole) for weight in weights]
    found[-1] += total - sum(found)
    return found


def estimate(rng: random.Random, mid: float, spread: float) -> tuple[int, int, int]:
    """Middle, low and high of an estimate, in nanoseconds."""
    low, high = mid * (1 - spread * rng.uniform(0.8, 1.2)), mid * (1 + spread)
    return int(mid * SECOND), int(low * SECOND), int(high * SECOND)


def request(rng: random.Random, index: int) -> dict[str, Any]:
    """One row of the ledger."""
    units = min(600, max(9, int(rng.lognormvariate(5.05, 0.8))))
    stored = units * UNIT_TOKENS
    fresh = rng.randrange(17, 640)
    restores = index % 12 != 7
    slow = 1.6 if 80 <= index < 110 else 1.0
    queue = int(rng.expovariate(1 / 14) * MS)
    spans = dict.fromkeys(
        ("engine_queue_ns", "lookup_ns", "lookup_to_read_ns", "restore_ns", "read_to_prefill_ns",
         "prefill_ns", "other_ns"), 0)  # fmt: skip
    spans["engine_queue_ns"] = queue
    spans["lookup_ns"] = units * rng.randrange(3_000, 9_001)
    computed = fresh if restores else fresh + stored
    spans["prefill_ns"] = int(recompute_seconds(computed) * rng.uniform(0.97, 1.04) * SECOND)
    spans["other_ns"] = rng.randrange(1_000, 90_000)
    mid, low, high = estimate(rng, recompute_seconds(stored), 0.06)
    restore: dict[str, Any] | None = None
    if restores:
        seconds = (FIXED * rng.uniform(0.4, 1.4) + PER_TOKEN * stored) * slow
        spans["restore_ns"] = int(seconds * rng.uniform(0.9, 1.08) * SECOND)
        spans["lookup_to_read_ns"] = rng.randrange(200_000, 4 * MS)
        spans["read_to_prefill_ns"] = rng.randrange(30_000, 900_000)
        parts = split(
            spans["restore_ns"],
            [
                rng.uniform(38, 46),
                rng.uniform(2, 7) * slow,
                rng.uniform(9, 14),
                rng.uniform(35, 47),
            ],
        )
        restore = {
            "bytes": units * UNIT_BYTES,
            "ops": units,
            "commands": units * 8,
            "exposed_ns": spans["restore_ns"],
            "hidden_ns": 0,
            "device_ns": parts[0],
            "block_queue_ns": parts[1],
            "software_ns": parts[2],
            "idle_ns": parts[3],
            "effective_depth": round(rng.uniform(1.0, 1.3), 3),
        }
    chosen = spans["restore_ns"] + spans["lookup_to_read_ns"] if restores else mid
    other = mid if restores else int((FIXED + PER_TOKEN * stored) * SECOND)
    gain = other - chosen
    margin = int(0.05 * (other + chosen) * rng.uniform(0.3, 1.2))
    sure = abs(gain) > margin
    outcome = "unknown" if not sure else "won" if gain > 0 else "lost"
    side = "restore" if restores else "recompute"
    shares = dict.fromkeys(("exact", "thread", "window", "shared", "none"), 0.0)
    if restores:
        kind = rng.choices(("exact", "thread", "window", "shared"), (2, 80, 11, 7))[0]
        shares[kind] = 1.0
        if kind == "shared":
            shares["shared"], shares["thread"] = 0.375, 0.625
    return {
        "id": f"req-{index:04d}",
        "t_arrival_ns": START_NS + index * 283_000_003 + rng.randrange(90 * MS),
        "ttft_ns": sum(spans.values()),
        "tokens": {
            "prompt": stored + fresh,
            "device_hit": 0,
            "storage_hit": stored if restores else 0,
            "computed": computed,
            "stored": stored,
        },
        "spans": spans,
        "restore": restore,
        "recompute": {"estimate_ns": mid, "low_ns": low, "high_ns": high},
        "restore_estimate": None
        if restores
        else dict(
            zip(
                ("estimate_ns", "low_ns", "high_ns"),
                estimate(rng, FIXED + PER_TOKEN * stored, 0.1),
                strict=True,
            )
        ),
        "verdict": "unknown" if outcome == "unknown" else f"{side}_{outcome}",
        "gain_ns": gain,
        "gain_low_ns": gain - margin,
        "gain_high_ns": gain + margin,
        "attribution": shares,
    }


def special(requests: list[dict[str, Any]]) -> None:
    """The rows that a report must not stumble over."""
    lost = requests[150]  # a second and more that nothing explains
    lost["spans"]["other_ns"] += 1_733 * MS
    lost["ttft_ns"] += 1_733 * MS
    stray = next(row for row in requests[120:] if row["restore"])  # bytes of nobody's request
    stray["attribution"] = dict.fromkeys(stray["attribution"], 0.0) | {"none": 1.0}
    stray.update(verdict="unknown", gain_ns=None, gain_low_ns=None, gain_high_ns=None)
    cut = requests[-1]  # the window ended before its first token
    cut.update(ttft_ns=None, spans=None, recompute=None, verdict="unknown")
    cut.update(gain_ns=None, gain_low_ns=None, gain_high_ns=None)
    cut["tokens"]["computed"] = None
    cut["id"] = "chatcmpl-7f3a9be2-55d1-4c0e-9d0f-3b1c2a77e901"


def attributed(requests: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of KV reads by class."""
    found = dict.fromkeys(("exact", "thread", "window", "shared", "none"), 0)
    for row in requests:
        for name in found if row["restore"] else ():
            found[name] += int(row["attribution"][name] * row["restore"]["bytes"])
    return found


def break_even() -> dict[str, Any]:
    """Both routes over the prefix length, and where they cross."""
    curve = []
    for tokens in (128, 256, 512, 1024, 1536, 2048, 4096, 8192):
        way = FIXED + PER_TOKEN * tokens
        cost = recompute_seconds(tokens)
        curve.append(
            {
                "tokens": tokens,
                "restore_ns": int(way * SECOND),
                "restore_low_ns": int(way * 0.91 * SECOND),
                "restore_high_ns": int(way * 1.12 * SECOND),
                "recompute_ns": int(cost * SECOND),
                "recompute_low_ns": int(cost * 0.95 * SECOND),
                "recompute_high_ns": int(cost * 1.06 * SECOND),
            }
        )
    return {
        "model": {
            "recompute_coefficients_s": [A, B, C], "recompute_n": 210, "recompute_error": 0.031,
            "restore_coefficients_s": [FIXED, PER_TOKEN / (UNIT_BYTES / UNIT_TOKENS)],
            "restore_n": 192,
        },
        "curve": curve,
        "tokens": 1240,
        "tokens_low": 1020,
        "tokens_high": 1610,
        "n": 192,
        "note": "",
    }  # fmt: skip


def timeline() -> list[dict[str, Any]]:
    """The KV device second by second; slow in the middle, one second without a read."""
    rng = random.Random(31)
    points = []
    for second in range(60):
        slow = 2.3 if 22 <= second < 31 else 1.0
        reads = 0 if second == 47 else rng.randrange(2_300, 2_900)
        rate = reads * 262_144 / slow
        points.append(
            {
                "start_ns": START_NS + second * SECOND,
                "end_ns": START_NS + (second + 1) * SECOND,
                "depth_mean": round(rng.uniform(0.9, 1.3) * slow, 3) if reads else 0.0,
                "read_bytes_per_s": float(rate),
                "write_bytes_per_s": float(rng.randrange(4_000_000, 12_000_000)),
                "reads": reads,
                "read_p50_ns": 583_000 * slow * rng.uniform(0.9, 1.1) if reads else None,
                "read_p99_ns": 2_117_000 * slow * rng.uniform(0.8, 1.5) if reads else None,
            }
        )
    return points


def load(
    commands: int, writes: int, size: int, share: float, depth: tuple[float, int, int], median: int
) -> dict[str, Any]:
    """What a queue or a device carried; depth is mean, p99 and peak."""
    return {
        "commands": commands, "reads": commands - writes, "writes": writes, "bytes": size,
        "share": share, "rate_per_s": commands / 60.003917229,
        "mean_depth": depth[0], "p99_depth": depth[1], "peak_depth": depth[2],
        "latency": {"median_ns": median, "p95_ns": median * 3.1, "p99_ns": median * 7.3,
                    "n": commands},
    }  # fmt: skip


def queue(controller: int | None, number: int, *carried: Any) -> dict[str, Any]:
    """One queue."""
    return {
        "controller": controller, "queue": number, **load(*carried), "queue_size": 128,
        "waiting_depth": carried[4][0] * 1.9, "idle_while_waiting_share": 0.211,
        "full_while_waiting_share": 0.0, "found_full_share": 0.0,
    }  # fmt: skip


def fabric() -> list[dict[str, Any]]:
    """Two paths to one namespace: the second is farther and loses segments."""
    found = []
    for index, (median, segments) in enumerate(
        (
            (311_000, (("driver",), ("wire_and_target",), ("receive",), ("completion",))),
            (1_203_000, (("driver", "wire_and_target"), ("receive",), ("completion",))),
        )
    ):
        half = 12_007 - 2 * index
        shares = (0.03, 0.79, 0.17, 0.01) if index == 0 else (0.951, 0.044, 0.005)
        deep = (1.7 + 4.4 * index, 6 + 13 * index, 15 + 16 * index)
        quarter = (1.1 + 2.1 * index, 4 + 7 * index, 9 + 9 * index)
        name, address = f"nvme3c{index}n1", f"traddr=10.7.{index}.21,trsvcid=4420"
        found.append(
            {
                "name": name,
                "transport": "nvme tcp",
                "head": "nvme3n1",
                "path": {
                    "device": 271_581_184 + index, "name": name, "head": "nvme3n1",
                    "controller": index, "transport": "tcp", "head_device": 271_581_190,
                    "nqn": "nqn.2014-08.org.example:kv", "address": address, "nsid": 1,
                    "namespace": None, "state": "live", "ana_state": "optimized",
                    "io_queues": 2, "queue_size": 128, "iopolicy": "round-robin",
                    "numa_node": 0, "names": ["nvme3c5n1", name] if index else [name],
                    "events": {"failovers": 0, "path_losses": 0, "retransmits": 31 * index,
                               "receive_gaps": 0, "congestion_events": 9 * index,
                               "reconnects": index, "timeouts": 0, "send_waits": 0},
                },
                "load": load(2 * half, 14, 2 * half * 1_048_576, 0.5, deep, median),
                "queues": [
                    queue(index, number, half, 7, half * 1_048_576, 0.25, quarter, median)
                    for number in (1, 2)
                ],
                "segments": [
                    {
                        "parts": list(parts), "share": share, "n": 2 * half,
                        "total_ns": int(median * 2 * half * share),
                        "median_ns": median * share, "p95_ns": median * share * 3.1,
                        "why_merged": "function nvme_tcp_try_send: this kernel has no such "
                        "function" if len(parts) > 1 else "",
                    }
                    for parts, share in zip(segments, shares, strict=True)
                ],
                "counted_from": "nvme",
                "lost_share": 0.0031 * index,
                "depth": {"mean": deep[0], "p99": deep[1], "time_at_zero_share": 0.19},
                "reads": 2 * half - 14, "read_bytes": (2 * half - 14) * 1_048_576,
                "writes": 14, "write_bytes": 14 * 1_048_576,
                "read_latency": {"median_ns": median, "p5_ns": median * 0.8,
                                 "p95_ns": median * 3.1, "n": 2 * half - 14},
                "surface": [],
                "timeline": [],
                "little_check": {"ratio": 0.991, "n": 2 * half},
            }
        )  # fmt: skip
    return found


def devices() -> list[dict[str, Any]]:
    """The device that serves the restores, and one that hardly does anything."""
    surface = [
        {
            "size_bytes": size, "depth": depth, "direct": True,
            "bytes_per_s": rate, "low_bytes_per_s": rate * 0.94, "high_bytes_per_s": rate * 1.05,
            "n": n, "source": source,
        }
        for size, depth, rate, n, source in (
            (262_144, 1, 431e6, 57, "capture"),
            (262_144, 8, 1.61e9, 5, "sweep"),
            (262_144, 32, 1.83e9, 5, "sweep"),
            (1_048_576, 1, 812e6, 5, "sweep"),
            (1_048_576, 8, 1.88e9, 5, "sweep"),
            (1_048_576, 32, 1.90e9, 5, "sweep"),
        )
    ]  # fmt: skip
    return [
        {
            "name": "loop3",
            "transport": "loop",
            "head": None,
            "path": None,
            "load": load(162_013, 1_902, 42_471_653_376, 1.0, (1.21, 4, 11), 583_000),
            "queues": [queue(None, 0, 162_013, 1_902, 42_471_653_376, 1.0, (1.21, 4, 11), 583_000)],
            "segments": [],
            "counted_from": "block",
            "lost_share": 0.0,
            "depth": {"mean": 1.13, "p99": 4, "time_at_zero_share": 0.412},
            "reads": 160_111,
            "read_bytes": 41_972_137_984,
            "writes": 1_902,
            "write_bytes": 499_515_392,
            "read_latency": {
                "median_ns": 583_000,
                "p5_ns": 402_000,
                "p95_ns": 1_917_000,
                "n": 160_111,
            },
            "surface": surface,
            "timeline": timeline(),
            "little_check": {"ratio": 0.993, "n": 160_111},
        },
        {
            "name": "nvme0n1",
            "transport": "pcie",
            "queues": [],
            "depth": {"mean": 0.004, "p99": 0, "time_at_zero_share": 0.9991},
            "reads": 13,
            "read_bytes": 53_248,
            "writes": 211,
            "write_bytes": 1_212_416,
            "read_latency": {"median_ns": None, "p5_ns": None, "p95_ns": None, "n": 13},
            "surface": [],
            "timeline": [],
            "little_check": {"ratio": None, "n": 224},
        },
        *fabric(),
    ]


def findings(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Four symptoms, gravest first."""

    def finding(slug: str, severity: str, confidence: float, subject: str, why: str,
                *evidence: tuple[str, float | None, str, int]) -> dict[str, Any]:  # fmt: skip
        keys = ("metric", "value", "unit", "n")
        return {
            "slug": slug,
            "severity": severity,
            "confidence": confidence,
            "subject": subject,
            "evidence": [dict(zip(keys, row, strict=True)) for row in evidence],
            "would_disprove": why,
        }

    lost = [-row["gain_ns"] for row in requests if row["verdict"] == "restore_lost"]
    restores = sum(row["restore"] is not None for row in requests)
    return [
        finding(
            "serial_restore", "critical", 0.96, "loop3",
            "a run with 8 reads in flight whose restores are not shorter",
            ("effective depth of a restore, median", 1.11, "", restores),
            ("share of restore time with nothing at the device", 0.41, "share", restores),
            ("device rate at depth 8 over the rate seen", 3.74, "x", 5),
        ),
        finding(
            "restore_loses", "warning", 0.9, "prefixes below 1,240 tokens",
            "restores of fewer than 1,020 tokens that beat their recompute estimate",
            ("restores that cost more than recomputing", len(lost), "requests", restores),
            ("time lost by them", sum(lost), "ns", len(lost)),
        ),
        finding(
            "small_blocks", "warning", 0.71, "units of 2.00 MiB",
            "the same rate at 256 KiB and 1 MiB requests at depth 1",
            ("bytes per block request, median", 262_144, "B", 160_111),
            ("rate at this size over the best at the same depth", 0.53, "share", 5),
        ),
        finding(
            "late_prefetch", "info", 0.55, "engine queue",
            "reads that begin before the request is scheduled",
            ("device idle while the request queued, median", 9_700_000, "ns", restores),
            ("time that an earlier start could hide", None, "ns", 0),
        ),
    ]  # fmt: skip


def proposals() -> list[dict[str, Any]]:
    """One to apply, one with a wide interval, one that lacks its measurement."""
    common = {
        "target": "vllm fs tier", "live": False,
        "apply": "restart the engine with the new value",
        "undo": "restart the engine with the old value",
    }  # fmt: skip
    return [
        {
            "slug": "queue_depth", "finding": "serial_restore", "knob": "bytes_in_flight",
            "current": UNIT_BYTES, "proposed": 8 * UNIT_BYTES, "unit": "B",
            "reason": "one read at a time leaves the device idle 41 % of the restore; at depth 8 "
            "the measured surface gives 1.50 GiB/s instead of 411 MiB/s",
            "effect": {"metric": "restore time", "low": -0.71, "mid": -0.64, "high": -0.52,
                       "unit": "share"},
            "risk": "8 times the memory for reads in flight: 16 MiB",
            "give_up": "restore time falls by less than 26 % in an A B B A run",
            "needs": None, **common,
        },
        {
            "slug": "restore_policy", "finding": "restore_loses", "knob": "min_restore_tokens",
            "current": 16, "proposed": 1240, "unit": "tokens",
            "reason": "restores of short prefixes cost more than computing them",
            "effect": {"metric": "TTFT of prefixes below 1,240 tokens", "low": -0.22, "mid": -0.12,
                       "high": 0.03, "unit": "share"},
            "risk": "more prefill work: 3 % more computed tokens", "give_up": "",
            "needs": None, **common,
        },
        {
            "slug": "prefetch", "finding": "late_prefetch", "knob": "prefetch_horizon",
            "current": None, "proposed": None, "unit": "ns",
            "reason": "the device was idle while requests queued; how much of the restore an "
            "earlier start would hide was not measured",
            "effect": None, "risk": "", "give_up": "",
            "needs": "kvprobe capture -d 60 under a load with at least 4 requests queued", **common,
        },
    ]  # fmt: skip


def document(seed: int = 20261201) -> dict[str, Any]:
    """The whole document."""
    rng = random.Random(seed)
    requests = [request(rng, index) for index in range(REQUESTS)]
    special(requests)
    return {
        "schema_version": 1,
        "capture": {
            "id": "5b1f0e4c9d3a4f52",
            "kvprobe": "0.1.0",
            "start_wall": 1_796_157_067_412_009_413,
            "start_ns": START_NS,
            "duration_ns": 60_003_917_229,
            "complete": True,
            "redacted": False,
            "host": "kv-node-07",
            "kernel": "6.18.0-amd64",
            "loader": "core",
            "devices": ["loop3", "nvme0n1", "nvme3n1"],
            "engine": {
                "name": "vllm_fs", "model": "Llama-3.1-8B", "unit_tokens": UNIT_TOKENS,
                "unit_bytes": UNIT_BYTES, "bytes_per_token": UNIT_BYTES // UNIT_TOKENS,
                "reads_in_flight": 1, "direct": True, "root": "/mnt/kv", "prefetch": False,
                "prefill": "modelled",
            },
            "signal": {"understood": 633, "ignored": 0},
            "clock": {
                "before_ns": 1_796_157_067_412_009_413 - START_NS,
                "after_ns": 1_796_157_067_412_009_413 - START_NS + 1_009,
                "uncertainty_ns": 211, "steps": 0,
            },
            "notes": [],
        },
        "losses": {
            "block": {"rows": 162_013, "lost": 0, "thinned": 0},
            "ops": {"rows": 20_252, "lost": 0, "thinned": 0},
            "lookups": {"rows": 61_007, "lost": 127, "thinned": 6_101},
            "requests": {"rows": REQUESTS, "lost": 0, "thinned": 0},
        },
        "missing": [
            {"what": "hardware queue numbers", "why": "the loop driver has one queue",
             "effect": "queue imbalance cannot be seen", "fix": ""}
        ],
        "cost": {
            "probe_ns_per_event": 163.0, "probe_runs": 260_317, "probe_cpu_share": 0.0007,
            "agent_cpu_share": 0.0061, "budget_share": None, "programs": [],
        },
        "requests": requests,
        "attributed_bytes": attributed(requests),
        "break_even": break_even(),
        "read_ahead": None,
        "devices": devices(),
        "findings": findings(requests),
        "proposals": proposals(),
    }  # fmt: skip


if __name__ == "__main__":
    SAMPLE.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
