"""What SGLang says: its request metrics files, its HiCache log lines, its root spans, its metrics.

SGLang looks for the stored part of a prompt when the request enters its queue, and reads it while
the request waits: so ``scheduled`` is when the request leaves the queue, as SGLang itself counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvprobe.adapter import JsonFiles, LogLine, Metrics, News, RequestNews, Span
from kvprobe.clock import Moment, whole_ns

_ID_CHARS = 512
_MOST_SECONDS = 1e10
_TIERS = {
    "device": "device_hit_tokens",
    "host": "host_hit_tokens",
    "storage": "storage_hit_tokens",
}

# ---------------------------------------------------------------- request metrics files


def read_request(line: Mapping[str, Any], moment: Callable[[int], Moment]) -> Sequence[News]:
    """One finished request (``--export-metrics-to-file``): the engine's ``meta_info`` of it.

    Its times are wall clock seconds, made from CLOCK_MONOTONIC readings. Versions that do not say
    how long the first token took have it when the prefill is finished.

    Raises:
        KeyError, ValueError: the object is no request.
    """
    request = line["id"]
    if not isinstance(request, str) or not 0 < len(request) <= _ID_CHARS:
        raise ValueError("no id")
    columns = {
        "request_received_ts": ("arrival_ns",),
        "forward_entry_time": ("scheduled_ns", "prefill_start_ns"),
        "prefill_finished_time": ("prefill_end_ns", "first_token_ns"),
    }
    times = {
        column: moment(wall_ns)
        for name, of in columns.items()
        if (wall_ns := _wall_ns(line.get(name))) is not None
        for column in of
    }
    first_ns = _duration_ns(line.get("first_token_latency"))
    if first_ns and "arrival_ns" in times:
        times["first_token_ns"] = times["arrival_ns"].later(first_ns)
    return [RequestNews(request, times, _tokens(line), finished=True)]


def _duration_ns(seconds: object) -> int | None:
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < _MOST_SECONDS:
        return None
    return whole_ns(seconds)


def _wall_ns(seconds: object) -> int | None:
    return _duration_ns(seconds) or None  # 0 is what was not measured


def _tokens(line: Mapping[str, Any]) -> dict[str, int]:
    """Token counts; a tier that is not named had nothing if the others are all that was found.

    Tiers are not named at all where nothing was found.
    """
    prompt, cached = _count(line.get("prompt_tokens")), _count(line.get("cached_tokens"))
    tokens = {} if prompt is None else {"prompt_tokens": prompt}
    if prompt is not None and cached is not None and cached <= prompt:
        tokens["computed_tokens"] = prompt - cached
    details = line.get("cached_tokens_details")
    if cached == 0:
        tokens |= dict.fromkeys(_TIERS.values(), 0)
    elif isinstance(details, Mapping):
        found = {
            column: count
            for tier, column in _TIERS.items()
            if (count := _count(details.get(tier))) is not None
        }
        if found and sum(found.values()) == cached:
            found = dict.fromkeys(_TIERS.values(), 0) | found
        tokens |= found
    return tokens


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 40 else None


REQUEST_FILES = JsonFiles(re.compile(r"sglang-request-metrics-\d{8}_\d{2}\.log"), read_request)

# ---------------------------------------------------------------- log


def _read_prefetch(match: re.Match[str], written: Moment | None) -> News | None:
    """Written when the scheduler takes the prefetch over, which may be long after its last read.

    ``completed`` tokens were read, ``matched`` of them had come into host memory meanwhile.
    """
    loaded = 0 if match["how"] == "dropped" else int(match["loaded"])
    return RequestNews(match["id"], tokens={"storage_hit_tokens": loaded})


def _read_filled(match: re.Match[str], written: Moment | None) -> News | None:
    """Host memory only passes through (``--hicache-host-memory-mode buffer_only``)."""
    return RequestNews(match["id"], tokens={"storage_hit_tokens": int(match["tokens"])})


def _read_declined(match: re.Match[str], written: Moment | None) -> News | None:
    return RequestNews(match["id"], tokens={"storage_hit_tokens": 0})


def _read_old_prefetch(match: re.Match[str], written: Moment | None) -> News | None:
    return RequestNews(match["id"], tokens={"storage_hit_tokens": int(match["tokens"])})


_N = r"\d{1,12}"
_REQUEST = rf"\S{{1,{_ID_CHARS}}}"
LOG_LINES = (
    LogLine(
        "prefetch",
        "HiCache prefetch ",
        re.compile(
            rf"HiCache prefetch (?P<how>success|dropped) req=(?P<id>{_REQUEST}) "
            rf"completed(?:={_N}|_local={_N} completed_synced={_N}) "
            rf"matched={_N} loaded=(?P<loaded>{_N})(?= |$)"
        ),
        _read_prefetch,
    ),
    LogLine(
        "prefetch without a tier in host memory",
        "HiCache prefetch fill committed ",
        re.compile(
            rf"HiCache prefetch fill committed req=(?P<id>{_REQUEST}) "
            rf"filled=(?P<tokens>{_N})(?= |$)"
        ),
        _read_filled,
    ),
    LogLine(
        "prefetch declined",
        "HiCache prefetch declined ",
        re.compile(rf"HiCache prefetch declined req=(?P<id>{_REQUEST}) reason="),
        _read_declined,
    ),
    LogLine(
        "prefetch (up to 0.5.12, DEBUG)",
        " completed with ",
        re.compile(rf"Prefetch (?P<id>{_REQUEST}) completed with (?P<tokens>{_N}) tokens"),
        _read_old_prefetch,
    ),
)

# ---------------------------------------------------------------- spans, metrics


def read_span(span: Span, moment: Callable[[int], Moment]) -> News | None:
    """The root span of a request. Spans of its stages do not say which request they are of.

    ``time_in_model_prefill`` runs from the dispatch to the first token, queue included: not used.
    """
    said = span.attributes
    request = said.get("gen_ai.request.id") or said.get("rid")
    if (
        not str(said.get("module", "")).startswith("sglang::")
        or not isinstance(request, str)
        or not 0 < len(request) <= _ID_CHARS
    ):
        return None
    arrival = moment(span.start_wall_ns)
    times = {"arrival_ns": arrival}
    first_ns = _duration_ns(said.get("gen_ai.latency.time_to_first_token"))
    if first_ns is not None:
        times["first_token_ns"] = arrival.later(first_ns)
    tokens = _tokens(
        {
            "prompt_tokens": said.get("gen_ai.usage.prompt_tokens"),
            "cached_tokens": said.get("gen_ai.usage.cached_tokens"),
        }
    )
    return RequestNews(request, times, tokens, finished=True)


METRICS = Metrics(
    re.compile(
        r"(?!.*_(?:bucket|created)$)"
        r"sglang:(?:prefetched_tokens|backuped_tokens|storage_prefetch_|prefetch_(?:pgs|bandwidth)"
        r"|backup_(?:pgs|bandwidth)|cached_tokens_total|prompt_tokens_total|hicache_|load_back_"
        r"|num_(?:running|queue)_reqs|time_to_first_token_seconds|queue_time_seconds)"
    )
)
