"""vLLM's log, spans and metrics of recorded runs: each is the others' proof."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvprobe.adapter import News, RequestNews, Sample, SignalPlace, Span
from kvprobe.clock import ClockSample, Moment, WallClock
from kvprobe.engines import vllm
from kvprobe.engines._vllm_signals import LOG_LINES, METRICS, read_span
from kvprobe.model import EngineFacts
from kvprobe.signals.merge import RequestMerger
from kvprobe.signals.places import open_places

DATA = Path(__file__).parents[1] / "data" / "engines" / "vllm"
SHARP = Moment(5_000_000_000, 5_000_002_000)
SECOND = Moment(7_000_000_000, 7_999_999_999)
WALL = WallClock(lambda: ClockSample(0, 1_000_000_007, 13))
"""A wall clock a second ahead, known to 13 ns."""


def hear(lines: Iterable[str], when: Moment | None = SECOND) -> list[News]:
    """All news of lines, as a log feed finds them."""
    found = []
    for line in lines:
        for kind in LOG_LINES:
            if kind.mark in line and (match := kind.pattern.search(line)):
                news = kind.read(match, when)
                found += [] if news is None else [news]
    return found


def log(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def spans(name: str) -> Iterator[Span]:
    for line in log(name):
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    attributes = {a["key"]: value(a["value"]) for a in span["attributes"]}
                    start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                    yield Span(span["name"], start, end, attributes)


def value(field: dict[str, Any]) -> Any:
    ((kind, found),) = field.items()
    return int(found) if kind == "intValue" else found


def page(name: str) -> list[Sample]:
    text = (DATA / name).read_text(encoding="utf-8")
    families = text_string_to_metric_families(text)
    return [Sample(s.name, s.labels, s.value) for family in families for s in family.samples]


def counter(name: str, metric: str, **labels: str) -> float:
    found = [s.value for s in page(name) if s.name == metric and labels.items() <= s.labels.items()]
    assert len(found) == 1, metric
    return found[0]


def merged(news: Iterable[News]) -> dict[str, dict[str, Any]]:
    merger = RequestMerger()
    for one in news:
        assert isinstance(one, RequestNews)
        merger.take(one, 0, last_word=one.finished)
    assert merger.late == 0
    rows, _ = merger.release(1, everything=True)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


# ---------------------------------------------------------------- log


def test_the_debug_log_tells_exactly_the_hits_under_the_engines_own_ids() -> None:
    hits = [n for n in hear(log("fs-tier-debug.log")) if "device_hit_tokens" in n.tokens]  # type: ignore[union-attr]
    assert hits == [
        RequestNews(
            id=name,
            tokens={"offload_hit_tokens": found, "device_hit_tokens": 0},
            internal=True,
        )
        for name, found in (("cmpl-a2-0-bb3b4d3f", 896), ("cmpl-b2-0-abb6419a", 3840))
    ]


@pytest.mark.parametrize(
    ("name", "page_name", "restored"),
    [
        ("fs-tier-debug.log", "metrics-fs-tier.txt", {"a2": 896, "b2": 3840}),
        ("restart-debug.log", "metrics-after-restart.txt", {"p1": 896, "p2": 3840, "q2": 3840}),
    ],
)
def test_hits_add_up_to_the_engines_counter(
    name: str, page_name: str, restored: dict[str, int]
) -> None:
    rows = merged(hear(log(name)))
    found = {row["id"].split("-")[1]: row["offload_hit_tokens"] for row in rows.values()}
    assert {request: tokens for request, tokens in found.items() if tokens} == restored
    assert sum(found.values()) == counter(page_name, "vllm:external_prefix_cache_hits_total")
    assert len(found) > len(restored), "what was looked up and not found is 0, not unknown"


def test_hits_are_what_the_client_was_told_when_the_host_tier_is_too_small() -> None:
    lines = log("tier-too-small-debug.log")
    told = [int(m[1]) for line in lines if (m := re.match(r"REQ .* cached (\d+) ", line))]
    rows = merged(hear(lines))
    assert [row["offload_hit_tokens"] for row in rows.values()] == told == [0, 0, 0, 0, 2944, 2944]


def test_a_request_that_may_not_load_found_nothing() -> None:
    rows = merged(hear(log("fs-tier-debug.log")))
    (forced,) = (row for row in rows.values() if row["id"].startswith("cmpl-c2-"))
    assert forced["offload_hit_tokens"] == 0
    assert hear(["] Request cmpl-x-0-00000000: max_load_tokens set to 896"]) == []


LINE = "(EngineCore pid=7) DEBUG 12-01 17:20:23 [distributed/.../offloading/scheduler.py:945] "
HIT = "Request cmpl-a2-0-bb3b4d3f hit 896 offloaded tokens after 13 GPU hit tokens"


@pytest.mark.parametrize(
    "line",
    [
        HIT,
        LINE + HIT,
        "Dec 01 17:20:23 node vllm[7]: " + LINE + HIT,
        '{"log":"' + LINE + HIT + '\\n","stream":"stderr"}',
        LINE.replace("scheduler.py:945", "scheduler.py:1047") + HIT + "\r",
    ],
)
def test_lines_are_read_however_they_were_kept(line: str) -> None:
    (news,) = hear([line])
    assert isinstance(news, RequestNews)
    assert news.tokens == {"offload_hit_tokens": 896, "device_hit_tokens": 13}


@pytest.mark.parametrize(
    "line",
    [
        LINE + f"Received request cmpl-x-0: prompt: '{HIT}'",
        LINE + "prompt was " + HIT,
        LINE + HIT.replace("896", "9" * 10),
        LINE + HIT.replace("GPU hit tokens", "GPU hit tokenses"),
        LINE + HIT.replace("cmpl-a2-0-bb3b4d3f", "x" * 513),
        LINE + "Request  hit 896 offloaded tokens after 13 GPU hit tokens",
    ],
)
def test_a_prompt_that_quotes_a_line_is_not_one(line: str) -> None:
    assert not any(isinstance(n, RequestNews) and n.tokens for n in hear([line]))


def test_arrivals_are_near_their_lines_and_under_the_id_that_is_written() -> None:
    lines = [line for line in log("fs-tier-debug.log") if "a1-0" in line][:2]
    about = Moment(SECOND.earliest_ns - 1_000_000, SECOND.latest_ns + 1_000_000)
    assert hear(lines) == [
        RequestNews("cmpl-a1-0", times={"arrival_ns": about}),
        RequestNews("cmpl-a1-0-bf3692ac", times={"arrival_ns": about}, internal=True),
    ]
    assert hear(lines, None) == []
    dotted = LINE + "Added request cmpl-v1.5-0-0123abcd."
    assert [n.id for n in hear([dotted]) if isinstance(n, RequestNews)] == ["cmpl-v1.5-0-0123abcd"]
    plain = hear([LINE + "Added request cmpl-ours-0."])[0]
    assert isinstance(plain, RequestNews) and not plain.internal, "no random suffix: one id"


def test_the_first_sharp_look_up_is_when_a_request_was_scheduled() -> None:
    line = LINE + "Offloading manager delayed request cmpl-a-0-01234567 as backend requested"
    other = LINE + (
        "Delaying request cmpl-a-0-01234567 since some of its chunks are already being loaded"
    )
    first, second, third = (SHARP.later(step * 11_000_000) for step in range(3))
    news = [*hear([line], first), *hear([line], second), *hear([other], third)]
    (row,) = merged(news).values()
    assert row["scheduled_ns"] == first.middle_ns
    assert row["offload_hit_tokens"] == 0 and row["device_hit_tokens"] == -1
    vague = hear([line, other], SECOND) + hear([line, other], None)
    assert all(isinstance(n, RequestNews) and not n.times for n in vague)
    (row,) = merged([*vague, *hear([LINE + HIT.replace("a2-0-bb3b4d3f", "a-0-01234567")])]).values()
    assert row["uncertainty_ns"] == -1 and row["offload_hit_tokens"] == 896


def test_lines_that_tell_of_the_engine() -> None:
    warning = (
        "(EngineCore pid=7) WARNING 12-01 17:20:23 [tiering/fs/manager.py:170] O_DIRECT is not "
        "supported at '/srv/kv'; falling back to buffered I/O for the 'fs' KV offload tier."
    )
    slots = (
        "(Worker pid=7) INFO 12-01 17:20:23 [disk_backend.py:160] DiskBackend: "
        "path=/srv/kv/slots.rank_0, slots=4099, total=1.00 GB, buf=2x262144 bytes (page_cache=%s)"
    )
    assert hear([warning]) == [EngineFacts("vllm", root="/srv/kv", direct=False)]
    for cached, direct in (("False", True), ("True", False)):
        assert hear([slots % cached]) == [
            EngineFacts(
                "vllm",
                root="/srv/kv",
                unit_bytes=262144,
                direct=direct,
                reads_in_flight=1,
                prefetch=False,
            )
        ]


def test_a_followed_log_gives_the_same_rows(tmp_path: Path) -> None:
    text = (DATA / "restart-debug.log").read_bytes()
    now = time.strftime("%m-%d %H:%M:%S").encode()  # what was before this machine has no row
    text = re.sub(rb"\d\d-\d\d \d\d:\d\d:\d\d", now, text)
    path = tmp_path / "vllm.log"
    path.write_bytes(text[: len(text) // 2])
    signal = open_places([SignalPlace("log", str(path))], [vllm.ENGINE])
    signal.poll()
    path.write_bytes(text)
    rows = signal.close().requests
    found = {row["id"].split("-")[1]: row["offload_hit_tokens"] for row in rows}
    assert found == {"p1": 896, "p2": 3840, "p3": 0, "q1": 0, "q2": 3840}
    assert list(signal.understood.values()) == [len(hear(log("restart-debug.log")))]


def test_nothing_else_of_real_logs_is_taken_for_news() -> None:
    known = re.compile(r"hit \d+ offloaded|delayed request|max_load_tokens|Received req|Added req")
    for name in ("fs-tier-debug.log", "restart-debug.log", "tier-too-small-debug.log"):
        lines = log(name)
        assert len(hear(lines)) == sum(known.search(line) is not None for line in lines) > 10


# ---------------------------------------------------------------- spans


def test_first_tokens_are_the_engines_own_to_the_nanosecond() -> None:
    told = [span for span in spans("spans-info-run.jsonl") if span.name == "llm_request"]
    news = [read_span(span, WALL.moment) for span in told]
    assert len(news) == 9
    total = 0
    for span, one in zip(told, news, strict=True):
        assert isinstance(one, RequestNews) and one.finished and not one.internal
        ttft = round(span.attributes["gen_ai.latency.time_to_first_token"] * 1e9)
        arrival, first = one.times["arrival_ns"], one.times["first_token_ns"]
        assert arrival == WALL.moment(span.start_wall_ns)
        assert first.middle_ns - arrival.middle_ns == ttft
        assert (first, first.uncertainty_ns) == (one.times["prefill_end_ns"], 13)
        total += ttft
    counted = counter("metrics-info-run.txt", "vllm:time_to_first_token_seconds_sum")
    assert total == pytest.approx(counted * 1e9, abs=9), "rounded nine times"


def test_prefill_starts_behind_the_queue_and_before_the_computing() -> None:
    for span in spans("spans-fs-tier.jsonl"):
        news = read_span(span, lambda wall: Moment(wall, wall))
        if not isinstance(news, RequestNews):
            continue
        seconds = {
            name: span.attributes[f"gen_ai.latency.{name}"]
            for name in ("time_in_queue", "time_in_model_prefill", "time_to_first_token")
        }
        arrival = span.start_wall_ns
        start = news.times["prefill_start_ns"]
        assert start.earliest_ns == arrival + round(seconds["time_in_queue"] * 1e9)
        before_first = seconds["time_to_first_token"] - seconds["time_in_model_prefill"]
        assert start.latest_ns == pytest.approx(arrival + before_first * 1e9, abs=2)
        assert start.uncertainty_ns < 9_000_000
        assert "scheduled_ns" not in news.times


def test_spans_and_log_make_whole_rows() -> None:
    told = [read_span(span, WALL.moment) for span in spans("spans-fs-tier.jsonl")]
    requests = [n for n in told if n is not None]
    assert len(requests) == 15 and None in told, "start-up spans tell nothing of requests"
    rows = merged([*hear(log("fs-tier-debug.log")), *requests])
    names = {"cmpl-a2-0": (1000, 896, 104), "cmpl-b2-0": (3900, 3840, 60)}
    for name, (prompt, found, computed) in names.items():
        row = rows[name]
        assert row["prompt_tokens"] == prompt and row["computed_tokens"] == computed
        assert (row["offload_hit_tokens"], row["device_hit_tokens"]) == (found, 0)
        assert row["storage_hit_tokens"] == row["host_hit_tokens"] == -1, "the log adds them up"
        assert row["arrival_ns"] < row["prefill_start_ns"] < row["first_token_ns"]
        assert row["uncertainty_ns"] < 9_000_000, "the log's seconds do not blur the spans"
    assert rows["cmpl-c2-0"]["offload_hit_tokens"] == 0
    assert len(rows) == 15


def test_cached_tokens_of_the_client_fit_the_queue_of_the_spans() -> None:
    told = {
        span.attributes["gen_ai.request.id"]: span
        for span in spans("spans-info-run.jsonl")
        if span.name == "llm_request"
    }
    for response in map(json.loads, log("responses-info-run.jsonl")):
        news = read_span(told.pop(response["id"]), lambda wall: Moment(wall, wall))
        assert isinstance(news, RequestNews)
        assert news.tokens == {"prompt_tokens": response["prompt_tokens"]}
        wait = news.times["prefill_start_ns"].earliest_ns - news.times["arrival_ns"].earliest_ns
        assert wait == round(response["metrics"]["queue_time_ms"] * 1e6)
    assert not told


GARBAGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.floats(0, 10)
)
NAMES = [
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.usage.prompt_tokens",
]


@given(st.dictionaries(st.sampled_from(NAMES), GARBAGE))
def test_whatever_a_span_says_its_times_are_in_order(attributes: dict[str, Any]) -> None:
    span = Span("llm_request", 10**18, 10**18 + 1, {"gen_ai.request.id": "x", **attributes})
    news = read_span(span, WALL.moment)
    assert isinstance(news, RequestNews)
    arrival = news.times["arrival_ns"]
    first = news.times.get("first_token_ns", arrival.later(10**15))
    start = news.times.get("prefill_start_ns", first)
    assert arrival.earliest_ns <= start.earliest_ns <= start.latest_ns <= first.latest_ns
    assert all(type(count) is int and count >= 0 for count in news.tokens.values())


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_bounds_of_the_prefill_may_cross(first: float, queue: float, prefill: float) -> None:
    told = dict(zip(NAMES, (first, queue, prefill), strict=False))
    span = Span("llm_request", 0, 1, {"gen_ai.request.id": "x", **told})
    news = read_span(span, lambda wall: Moment(wall, wall))
    assert isinstance(news, RequestNews)
    start, end = news.times["prefill_start_ns"], news.times["first_token_ns"].latest_ns
    assert 0 <= start.earliest_ns <= start.latest_ns <= end == round(first * 1e9)
    for bound in (queue, first - prefill):
        inside = min(max(round(bound * 1e9), 0), end)
        assert start.earliest_ns - 1 <= inside <= start.latest_ns + 1


@pytest.mark.parametrize("name", ["", None, 7, b"x"])
def test_a_span_without_a_request_tells_nothing(name: Any) -> None:
    assert read_span(Span("llm_request", 1, 2, {"gen_ai.request.id": name}), WALL.moment) is None
    assert read_span(Span("other", 1, 2, {"gen_ai.request.id": "x"}), WALL.moment) is None


# ---------------------------------------------------------------- metrics


def test_the_counters_that_matter_are_kept_and_no_buckets() -> None:
    samples = page("metrics-fs-tier.txt")
    kept = [s for s in samples if METRICS.keep.match(s.name)]
    names = {s.name for s in kept}
    assert names >= {
        "vllm:kv_offload_tiering_read_bytes_total",
        "vllm:kv_offload_tiering_chunk_hits_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_cached_by_source_total",
        "vllm:request_prefill_kv_computed_tokens_sum",
        "vllm:request_queue_time_seconds_sum",
        "vllm:time_to_first_token_seconds_count",
        "vllm:num_requests_running",
    }
    assert not any(name.endswith(("_bucket", "_created")) for name in names)
    assert not any("generation" in name or "cache_config" in name for name in names)
    assert 20 < len(kept) < 80 < len(samples), "a scrape a second is to stay small"


def test_read_bytes_are_hits_times_the_size_of_a_file() -> None:
    for name in ("metrics-fs-tier.txt", "metrics-after-restart.txt", "metrics-info-run.txt"):
        hits = counter(name, "vllm:kv_offload_tiering_chunk_hits_total", tier="1:fs")
        read = counter(name, "vllm:kv_offload_tiering_read_bytes_total", tier="1:fs")
        assert read == hits * 262_144


def test_the_configuration_is_told_by_later_versions() -> None:
    assert METRICS.facts is not None
    assert METRICS.facts(page("metrics-fs-tier.txt")) is None
    labels = {"cpu_num_chunks": "32", "cpu_blocks_per_chunk": "4", "engine": "0"}
    for size, known in (("262144", 262144), ("None", None), ("", None), ("-1", None)):
        said = Sample("vllm:kv_offload_config_info", {**labels, "cpu_kv_bytes_per_chunk": size}, 1)
        facts = METRICS.facts([said])
        assert facts == (EngineFacts("vllm", unit_bytes=known) if known else None)
