"""What vLLM says: DEBUG lines of its offloading scheduler, one span a request, its metrics.

Two ids name a request: the client's (``cmpl-X-0``; spans, ``Received request``) and the engine's
own, which has a random suffix (``cmpl-X-0-bb3b4d3f``; the scheduler's lines). Lines quoted are of
0.32; 0.22 and later were compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from kvprobe.adapter import LogLine, Metrics, News, RequestNews, Sample, Span, Total
from kvprobe.clock import Moment
from kvprobe.engines._options import integer
from kvprobe.model import EngineFacts

_SECOND_NS = 1_000_000_000
_MOST_SECONDS = 1e6
_SHARP_NS = 5_000_000
"""A stamp of whole seconds (the default) says less of the first look-up than arrival and first
token do, and would make the whole row as vague."""
_NEAR_NS = 1_000_000
"""A request's arrival is logged near it, not at it; where spans tell, they tell better."""

_ID = r"(\S{1,512})"
_START = r"(?:^|\] )"
_OWN_ID = re.compile(r"-[0-9a-f]{8}$")


# ---------------------------------------------------------------- log


def _request(name: str, **more: Any) -> RequestNews:
    """News under the engine's own id; one without the suffix is the client's too."""
    return RequestNews(name, internal=_OWN_ID.search(name) is not None, **more)


def _hit(match: re.Match[str], when: Moment | None) -> News:
    """Written when the look-up is over and found something; host memory and storage together."""
    tokens = {"offload_hit_tokens": int(match[2]), "device_hit_tokens": int(match[3])}
    return _request(match[1], tokens=tokens)


def _delayed(match: re.Match[str], when: Moment | None) -> News:
    """Written at each step while tiers look for the prompt's chunks.

    Nothing is found so far; a line of ``_hit`` follows if anything is.
    """
    return _request(match[1], tokens={"offload_hit_tokens": 0}, times=_looked(when))


def _waits_for_other(match: re.Match[str], when: Moment | None) -> News:
    """Found, but on its way for another request: looked up again at the next step."""
    return _request(match[1], times=_looked(when))


def _no_load(match: re.Match[str], when: Moment | None) -> News:
    """The client asked for no restore (``kv_transfer_params.max_load_tokens`` 0)."""
    return _request(match[1], tokens={"offload_hit_tokens": 0})


def _received(match: re.Match[str], when: Moment | None) -> News | None:
    return None if when is None else RequestNews(match[1], times={"arrival_ns": _near(when)})


def _added(match: re.Match[str], when: Moment | None) -> News | None:
    return None if when is None else _request(match[1], times={"arrival_ns": _near(when)})


def _near(when: Moment) -> Moment:
    return Moment(when.earliest_ns - _NEAR_NS, when.latest_ns + _NEAR_NS)


def _looked(when: Moment | None) -> dict[str, Moment]:
    return {"scheduled_ns": when} if when is not None and when.uncertainty_ns <= _SHARP_NS else {}


def _buffered(match: re.Match[str], when: Moment | None) -> News:
    return EngineFacts("vllm", root=match[1], direct=False)


def _slot_file(match: re.Match[str], when: Moment | None) -> News:
    """The disk backend of SimpleCPUOffloadConnector: one file a worker, one block a slot."""
    return EngineFacts(
        "vllm",
        root=match[1].rpartition("/")[0] or None,
        unit_bytes=int(match[2]) or None,
        direct=match[3] == "False",
        reads_in_flight=1,
        prefetch=False,
    )


def _line(name: str, mark: str, pattern: str, read: Callable[..., News | None]) -> LogLine:
    return LogLine(name, mark, re.compile(_START + pattern), read)


LOG_LINES = (
    _line(
        "hit",
        " offloaded tokens after ",
        rf"Request {_ID} hit (\d{{1,9}}) offloaded tokens after (\d{{1,9}}) GPU hit tokens\b",
        _hit,
    ),
    _line(
        "delayed",
        "Offloading manager delayed request ",
        rf"Offloading manager delayed request {_ID} as backend requested\b",
        _delayed,
    ),
    _line(
        "waits for another request",
        " are already being loaded",
        rf"Delaying request {_ID} since some of its (?:chunks|blocks) are already being loaded\b",
        _waits_for_other,
    ),
    _line(
        "no load",
        ": max_load_tokens set to 0",
        rf"Request {_ID}: max_load_tokens set to 0\b",
        _no_load,
    ),
    _line("received", "Received request ", rf"Received request {_ID}: ", _received),
    _line("added", "Added request ", r"Added request (\S{1,512}?)\.(?![\w.-])", _added),
    _line(
        "buffered",
        "; falling back to buffered I/O",
        r"O_DIRECT is not supported at '([^']{1,4096})'; falling back to buffered I/O",
        _buffered,
    ),
    _line(
        "slot file",
        "DiskBackend: path=",
        r"DiskBackend: path=(.{1,4096}), slots=\d+, total=[\d.]+ GB, buf=\d+x(\d{1,15}) bytes "
        r"\(page_cache=(True|False)\)",
        _slot_file,
    ),
)


# ---------------------------------------------------------------- spans


def read_span(span: Span, moment: Callable[[int], Moment]) -> News | None:
    """The one span that vLLM sends of a request when it is over; its start-up spans are not news.

    The time to first token is the engine's own figure to the nanosecond. ``time_in_queue`` runs on
    while the KV cache is loaded, so that its end is the start of the prefill and says nothing of
    when the request was first scheduled.
    """
    request = span.attributes.get("gen_ai.request.id")
    if span.name != "llm_request" or not isinstance(request, str) or not request:
        return None
    arrival = moment(span.start_wall_ns)
    times = {"arrival_ns": arrival}
    first_ns = _latency(span, "time_to_first_token")
    if first_ns is not None:
        times |= {"first_token_ns": arrival.later(first_ns)}
        times |= {"prefill_end_ns": arrival.later(first_ns)}
        start = _prefill_start(span, first_ns)
        if start is not None:
            low, high = start
            times |= {
                "prefill_start_ns": Moment(arrival.earliest_ns + low, arrival.latest_ns + high)
            }
    prompt = span.attributes.get("gen_ai.usage.prompt_tokens")
    tokens = {"prompt_tokens": prompt} if type(prompt) is int and prompt >= 0 else {}
    return RequestNews(request, times=times, tokens=tokens, finished=True)


def _prefill_start(span: Span, first_ns: int) -> tuple[int, int] | None:
    """Bounds of the start of the prefill, from the arrival on.

    The queue begins in the engine, some time after the arrival at the server, and the first token
    leaves the engine some time before the server sees it. What both took is the distance of the
    bounds; they are of different clocks, so that they may cross by a hair.
    """
    queue_ns, prefill_ns = (
        _latency(span, f"time_in_{name}") for name in ("queue", "model_prefill")
    )
    if queue_ns is None or prefill_ns is None:
        return None
    low, high = sorted((queue_ns, first_ns - prefill_ns))
    return min(max(low, 0), first_ns), min(max(high, 0), first_ns)


def _latency(span: Span, name: str) -> int | None:
    seconds = span.attributes.get(f"gen_ai.latency.{name}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return round(seconds * _SECOND_NS) if 0 <= seconds <= _MOST_SECONDS else None


# ---------------------------------------------------------------- metrics


def _facts(samples: Sequence[Sample]) -> EngineFacts | None:
    """Bytes of a chunk, which is a file of the fs tier (0.33 and later say so)."""
    for sample in samples:
        if sample.name == "vllm:kv_offload_config_info":
            unit_bytes = integer(sample.labels.get("cpu_kv_bytes_per_chunk"))
            if unit_bytes is not None and unit_bytes > 0:
                return EngineFacts("vllm", unit_bytes=unit_bytes)
    return None


METRICS = Metrics(
    keep=re.compile(
        r"vllm:(?!\w*_(?:bucket|created)$)"
        r"(?:kv_offload_|simple_kv_offload_|external_prefix_cache_|prefix_cache_|prompt_tokens_"
        r"|request_prefill_|request_queue_time_|time_to_first_token_|num_requests_)"
    ),
    facts=_facts,
    totals=(
        Total("prompt_tokens", "vllm:prompt_tokens_total"),
        Total("device_hit_tokens", "vllm:prefix_cache_hits_total"),
        Total("offload_hit_tokens", "vllm:external_prefix_cache_hits_total"),
        Total("host_hit_tokens", "vllm:prompt_tokens_cached_by_source_total", {"source": "host"}),
        Total("read_bytes", "vllm:kv_offload_tiering_read_bytes_total", {"tier": r"\d+:fs"}),
        Total("chunk_hits", "vllm:kv_offload_tiering_chunk_hits_total", {"tier": r"\d+:fs"}),
    ),
)
