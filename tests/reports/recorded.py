"""A capture file of a simulated node, for what reads real files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from kvprobe.capture.archive import write_archive
from kvprobe.capture.frames import object_array
from kvprobe.capture.manifest import Host
from kvprobe.model import Frame, Loss
from kvprobe.schema import TABLES
from tests.correlator.simulate import DEVICE, Node

REQUESTS = 211
SIZE_BYTES = 13 << 30


def write_capture(path: Path, *, complete: bool = True, lost: int = 0) -> Path:
    """Record 211 requests that restore, recompute or both; some restores lose."""
    node = Node(
        seed=7, concurrency=4, requests=REQUESTS, own_stored=40, cold_share=0.15, compute_below=3
    ).run()
    tables = node.capture()
    frames = {name: dict(tables.frame(name)) for name in TABLES}
    frames["lookups"]["path"] = object_array(
        [_vllm_path(text) for text in frames["lookups"]["path"].tolist()]
    )
    frames["depth"], frames["histogram"] = _sums(*tables.manifest.window_ns)
    rows = {name: len(next(iter(frame.values()))) for name, frame in frames.items()}
    losses = {name: Loss(count) for name, count in rows.items()}
    losses["block"] = replace(losses["block"], lost=lost)
    manifest = replace(
        tables.manifest,
        complete=complete,
        devices=tuple(replace(d, size_bytes=SIZE_BYTES) for d in tables.manifest.devices),
        losses=losses,
        engine_name="vllm",
        host=Host("kv-node-07", "6.18.0"),
    )
    write_archive(path, manifest, {name: _once(frame) for name, frame in frames.items()})
    return path


def _once(frame: Frame) -> Iterator[Frame]:
    yield frame


def _vllm_path(text: str) -> str:
    """The name that vLLM's file tier would give this chunk."""
    stem, _, suffix = text.rsplit("/", 1)[1].partition(".bin")
    digest = sha256(stem.encode()).hexdigest()
    return f"/kv/Llama_0123456789ab_r0/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin{suffix}"


def _sums(start_ns: int, end_ns: int) -> tuple[Frame, Frame]:
    """In-kernel sums of thirteen intervals: depth 1 for 3/5 of the time, 0 for 2/5."""
    edges = np.linspace(start_ns, end_ns, 14).astype(np.int64)
    begin, end = edges[:-1], edges[1:]
    zeros, ones = np.zeros(13, np.int64), np.ones(13, np.int64)
    time = end - begin
    depth = {
        "start_ns": np.concatenate([begin, begin]),
        "end_ns": np.concatenate([end, end]),
        "device": np.full(26, DEVICE),
        "direction": np.zeros(26, np.int64),
        "depth": np.concatenate([zeros, ones]),
        "time_ns": np.concatenate([time * 2 // 5, time - time * 2 // 5]),
    }
    histogram = {
        "start_ns": begin,
        "end_ns": end,
        "device": np.full(13, DEVICE),
        "direction": zeros,
        "size_low_bytes": np.full(13, 65_536),
        "latency_low_ns": np.full(13, 262_144),
        "latency_high_ns": np.full(13, 524_288),
        "requests": np.full(13, 541),
        "bytes": np.full(13, 541 * 65_536),
    }
    return depth, histogram
