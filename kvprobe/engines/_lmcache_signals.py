"""What LMCache says of requests: its lookup-hash log, its log lines, its spans.

The server hears of a request when vLLM's scheduler looks at it for the first time, so the moment
of the look-up is when the request was scheduled, in kvprobe's sense. Ids are vLLM's internal ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvprobe.adapter import JsonFiles, LogLine, Metrics, News, RequestNews, Span
from kvprobe.clock import Moment, whole_ns
from kvprobe.model import EngineFacts

NAME = "lmcache"
_INTERNAL = re.compile(r".+-[0-9a-f]{8}")
_ID_CHARS = 512
_MILLISECOND_NS = 1_000_000
_SHARP_NS = 5 * _MILLISECOND_NS
"""A stamp of whole seconds, as somebody else may put it, would make the whole row as vague."""
_DTYPE_BYTES = {
    "float64": 8,
    "double": 8,
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
_HASH = re.compile(r"(-?)0x([0-9a-f]{1,128})")


def is_internal(request: str) -> bool:
    """Whether vLLM may have made this id of the client's; those of LMCache's own clients not."""
    return _INTERNAL.fullmatch(request) is not None


# ---------------------------------------------------------------- lookup-hash log


def read_lookup(line: Mapping[str, Any], moment: Callable[[int], Moment]) -> Sequence[News]:
    """News of one look-up: every chunk key of the prompt, and the size of a chunk.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: the object is no look-up.
    """
    chunk_tokens, prompt_tokens = _count(line["chunk_size"]), _count(line["seq_len"])
    if not chunk_tokens:
        raise ValueError("a chunk of no tokens")
    facts = EngineFacts(
        name=NAME,
        model=str(line["model_name"]) or None,
        unit_tokens=chunk_tokens,
        unit_bytes=_chunk_bytes(line["dtypes"], line["shapes"]),
    )
    keys = tuple(_file_hash(text) for text in line["chunk_hashes"])
    seconds, request = float(line["timestamp"]), line["request_id"]
    if seconds <= 0 or not isinstance(request, str) or len(request) > _ID_CHARS:
        raise ValueError("no time or no id")
    if not request:
        return [facts]
    return [
        facts,
        RequestNews(
            request,
            times={"scheduled_ns": moment(whole_ns(seconds))},
            tokens={"prompt_tokens": prompt_tokens},
            keys=keys,
            internal=is_internal(request),
        ),
    ]


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError("not a count")
    return value


def _file_hash(text: str) -> str:
    match = _HASH.fullmatch(text)
    if match is None:
        raise ValueError("not a hash")
    return match[1] + match[2]


def _chunk_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int | None:
    """Bytes of one rank's chunk; None where layers differ, as then there are several files."""
    if len(dtypes) != 1 or len(shapes) != 1:
        return None
    item = _DTYPE_BYTES.get(dtypes[0].removeprefix("torch."))
    return item * math.prod(map(_count, shapes[0])) or None if item else None


LOOKUP_FILES = JsonFiles(re.compile(r"lookup_hashes_\d{8}_\d{6}_\d{6,}\.jsonl"), read_lookup)

# ---------------------------------------------------------------- log


def _read_prefetch(match: re.Match[str], written: Moment | None) -> News | None:
    """The server: chunks found in its memory (L1) and on storage (L2), of those of all ranks."""
    request = match["id"]
    begun = None
    if written is not None:
        # Printed in steps of 0.1 ms.
        took_ns, half_step_ns = round(float(match["ms"]) * _MILLISECOND_NS), _MILLISECOND_NS // 20
        begun = Moment(
            written.earliest_ns - took_ns - half_step_ns, written.latest_ns - took_ns + half_step_ns
        )
    return RequestNews(
        request,
        times=_looked(begun),
        units={"host_hit_tokens": int(match["l1"]), "storage_hit_tokens": int(match["l2"])},
        of_units=int(match["of"]),
        internal=is_internal(request),
    )


def _read_lookup_start(match: re.Match[str], written: Moment | None) -> News | None:
    return RequestNews(match["id"], times=_looked(written), internal=is_internal(match["id"]))


def _read_nothing_found(match: re.Match[str], written: Moment | None) -> News | None:
    tokens = {"host_hit_tokens": 0, "storage_hit_tokens": 0}
    return RequestNews(match["id"], tokens=tokens, internal=is_internal(match["id"]))


def _read_hits(match: re.Match[str], written: Moment | None) -> News | None:
    """In-process: memory and disk together; hits not worth loading are computed instead."""
    loaded = 0 if match["skipped"] else max(int(match["load"]), 0)
    tokens = {"prompt_tokens": int(match["total"]), "offload_hit_tokens": loaded}
    if match["computed"]:
        tokens["device_hit_tokens"] = int(match["computed"])
    return RequestNews(match["id"], _looked(written), tokens, internal=is_internal(match["id"]))


def _read_retrieved(match: re.Match[str], written: Moment | None) -> News | None:
    return RequestNews(
        match["id"],
        tokens={"offload_hit_tokens": int(match["tokens"])},
        internal=is_internal(match["id"]),
    )


def _looked(when: Moment | None) -> dict[str, Moment]:
    return {"scheduled_ns": when} if when is not None and when.uncertainty_ns <= _SHARP_NS else {}


_N = r"\d{1,12}"
_REQUEST = rf"[^\s,\]]{{1,{_ID_CHARS}}}"
LOG_LINES = (
    LogLine(
        "prefetch of the server",
        "Prefetch request completed (L1+L2): ",
        re.compile(
            rf"Prefetch request completed \(L1\+L2\): {_N}/(?P<of>{_N}) retained keys "
            rf"\((?P<l1>{_N}) L1, (?P<l2>{_N}) L2\) in (?P<ms>{_N}\.\d+) ms "
            rf"\(external_request_id=(?P<id>{_REQUEST}), prefetch_request_id="
        ),
        _read_prefetch,
    ),
    LogLine(
        "look-up of the server (DEBUG)",
        "MP lookup/prefetch start: session=",
        re.compile(rf"MP lookup/prefetch start: session=(?P<id>{_REQUEST})(?= |$)"),
        _read_lookup_start,
    ),
    LogLine(
        "look-up of the server that found nothing (DEBUG)",
        " found_count=0",
        re.compile(rf"MP lookup/prefetch end: session=(?P<id>{_REQUEST}) found_count=0(?= |$)"),
        _read_nothing_found,
    ),
    LogLine(
        "hits in-process",
        "LMCache hit tokens: ",
        re.compile(
            rf"Reqid: (?P<id>{_REQUEST}), Total tokens (?P<total>{_N}), "
            rf"(?:Inference Engine computed tokens: (?P<computed>{_N}), )?"
            rf"LMCache hit tokens: {_N}, (?:but )?need to load: (?P<load>-?{_N})"
            r"(?P<skipped> < min_retrieve)?"
        ),
        _read_hits,
    ),
    LogLine(
        "retrieval in-process",
        "] Retrieved ",
        re.compile(
            rf"\[req_id=(?P<id>{_REQUEST})\] Retrieved (?P<tokens>{_N}) out of {_N} "
            r"(?:required tokens|out of total )"
        ),
        _read_retrieved,
    ),
)

# ---------------------------------------------------------------- spans, metrics


def read_span(span: Span, moment: Callable[[int], Moment]) -> News | None:
    """The server's root span of a request, and the span of its look-up, whose values are text."""
    if span.name not in ("request", "mp.lookup_prefetch"):
        return None
    said = span.attributes
    request = said.get("session_id")
    try:
        host, storage = int(said["l1_hit_tokens"]), int(said["l2_hit_tokens"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not isinstance(request, str) or not 0 < len(request) <= _ID_CHARS or min(host, storage) < 0:
        return None
    return RequestNews(
        request,
        times={"scheduled_ns": moment(span.start_wall_ns)},
        tokens={"host_hit_tokens": host, "storage_hit_tokens": storage},
        internal=is_internal(request),
        finished=span.name == "request",
    )


METRICS = Metrics(
    # Ages, reuse gaps and the event bus say nothing of requests or storage.
    re.compile(
        r"(?!.*_(?:bucket|created)$)"
        r"(?:lmcache:(?:num_|local_|time_to_|retrieve_|store_|remote_)"
        r"|lmcache_mp_(?:l2_|lookup|num_|inflight_|active_prefetch|l1_(?:memory|usage|staging|read|write)"
        r"|transfer_))"
    )
)
