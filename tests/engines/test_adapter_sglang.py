"""SGLang: names of files, what it says of requests, its processes, its settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import KVPath, Process, RequestNews, RunningEngine, SignalPlace, Span
from kvprobe.clock import Moment
from kvprobe.engines import sglang
from kvprobe.model import EngineFacts
from kvprobe.signals.merge import RequestMerger
from tests.engines.small_model import MODEL, RANK_BYTES

PATHS = Path(__file__).parents[1] / "data" / "engines" / "sglang" / "paths.txt"
HASH = "19581e27de7ced00ff1ce50b2047e7a567c76b1cbaebabe5ef03f7c3017bb5b7"
RECEIVED = 1796145999.25
RECEIVED_NS = 1796145999_250000000

recognise = sglang.recognise


def detect(process: Process) -> RunningEngine | None:
    assert sglang.ENGINE.detect is not None
    return sglang.ENGINE.detect(process)


def moment(wall_ns: int) -> Moment:
    return Moment(wall_ns - 50, wall_ns + 50)


def news_of(line: str) -> list[RequestNews]:
    found = []
    for kind in sglang.ENGINE.log_lines:
        if kind.mark in line and (match := kind.pattern.search(line)):
            news = kind.read(match, moment(7))
            assert isinstance(news, RequestNews)
            found.append(news)
    return found


def read_request(line: Mapping[str, Any]) -> RequestNews:
    (news,) = sglang.ENGINE.json_files[0].read(line, moment)
    assert isinstance(news, RequestNews)
    return news


def read_span(span: Span) -> RequestNews | None:
    assert sglang.ENGINE.read_span is not None
    news = sglang.ENGINE.read_span(span, moment)
    assert news is None or isinstance(news, RequestNews)
    return news


def row(*news: RequestNews) -> dict[str, Any]:
    merger = RequestMerger()
    for each in news:
        merger.take(each, 1, last_word=False)
    (found,), _ = merger.release(2, everything=True)
    return found


# ---------------------------------------------------------------- files


def test_recorded_paths() -> None:
    paths = PATHS.read_text(encoding="utf-8").splitlines()
    found = {path: recognise(path) for path in paths}
    assert Counter(p.temporary if p else None for p in found.values()) == {
        False: 32,
        True: 32,
        None: 2,
    }
    unknown = sorted(path for path, known in found.items() if known is None)
    assert unknown == ["/srv/kv/sgl", "/srv/kv/sgl/nope_org-tiny_0_1.bin"]
    assert len({known.key for known in found.values() if known and not known.temporary}) == 32


@pytest.mark.parametrize(
    "path",
    [
        f"/srv/{HASH}.bin",
        f"/srv/{HASH}_.bin",
        f"/srv/{HASH[1:]}_m_0_1.bin",
        f"/srv/{HASH}0_m_0_1.bin",
        f"/srv/{HASH.upper()}_m_0_1.bin",
        f"/srv/{HASH}_m_0_1.bin.gz",
        f"/srv/{HASH}_m_0_1.binx",
        f"/srv/{HASH}_m_0_1",  # nixl, but not in its folder
        f"/srv/5e/{HASH}",
        f"/srv/5/{HASH}_m_0_1",
        f"/srv/5E/{HASH}_m_0_1",
        f"/srv/5ef/{HASH}_m_0_1",
        f"/srv/5e/{HASH}_m.safetensors",
        f"/srv/5e/{HASH}_m.tmp",
        "/srv/.0f172a76d6754ccf9fbf84b4ba87c62.tmp",
        "/srv/0f172a76d6754ccf9fbf84b4ba87c62f.tmp",
        "/srv/.0f172a76d6754ccf9fbf84b4ba87c62f.tmp.1",
        f"/srv/sha256/{HASH[:2]}/{HASH}/data",
        f"/srv/{HASH}_{'m' * 200}.bin",
    ],
)
def test_near_misses(path: str) -> None:
    assert recognise(path) is None


@given(
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.text("abcXYZ0189.-_", min_size=1, max_size=40),
    st.integers(0, 512),
    st.integers(1, 512),
)
def test_names_as_the_engine_makes_them(key: str, model: str, rank: int, ranks: int) -> None:
    name = f"{key}_{model}_{rank}_{ranks}"
    assert recognise(f"/srv/{name}.bin") == KVPath(key)
    assert recognise(f"/srv/1f/{name}") == KVPath(key)


@given(st.text("@_-%0af.:/ \n", max_size=300))
def test_no_path_raises(text: str) -> None:
    for path in (text, f"1f/{HASH}_{text}", f"{HASH}.{text}.bin"):
        known = recognise(path)
        assert known is None or known.key in path


def test_a_files_size_is_a_fact(tmp_path: Path) -> None:
    assert sglang.facts(str(tmp_path)) is None
    assert sglang.facts(str(tmp_path / "none")) is None
    (tmp_path / f"{HASH}.mamba_m_0_2.bin").write_bytes(bytes(17))
    (tmp_path / "other.bin").write_bytes(bytes(19))
    assert sglang.facts(str(tmp_path)) is None
    (tmp_path / f"{HASH}_m_0_2.bin").write_bytes(bytes(4099))
    found = sglang.facts(str(tmp_path))
    assert found is not None
    assert (found.unit_bytes, found.reads_in_flight, found.direct) == (4099, 1, False)


# ---------------------------------------------------------------- request metrics files


def request(**changed: object) -> dict[str, object]:
    return {
        "request_parameters": '{"rid": "a1b2", "text": "a prompt"}',
        "id": "a1b2",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 1997,
        "cached_tokens": 131 + 257 + 521,
        "cached_tokens_details": {
            "device": 131,
            "host": 257,
            "storage": 521,
            "storage_backend": "HiCacheFile",
        },
        "request_received_ts": RECEIVED,
        "queue_time": 0.0625,
        "forward_entry_time": RECEIVED + 0.125,
        "prefill_finished_time": RECEIVED + 0.5,
        "e2e_latency": 0.75,
    } | changed


def test_file_names_of_the_request_metrics() -> None:
    names = sglang.ENGINE.json_files[0].names
    assert names.fullmatch("sglang-request-metrics-20261201_17.log")
    for other in (
        "sglang-request-metrics-20261201.log",
        "sglang-request-metrics-20261201_17.log.1",
        "my-sglang-request-metrics-20261201_17.log",
    ):
        assert names.fullmatch(other) is None


def test_nothing_was_found() -> None:
    tokens = read_request(request(cached_tokens=0, cached_tokens_details=None)).tokens
    assert dict(tokens) == {
        "prompt_tokens": 1997,
        "computed_tokens": 1997,
        "device_hit_tokens": 0,
        "host_hit_tokens": 0,
        "storage_hit_tokens": 0,
    }


def test_the_first_token_took_what_the_engine_says() -> None:
    times = read_request(request(first_token_latency=0.503)).times
    assert times["first_token_ns"].middle_ns == RECEIVED_NS + 503_000_000
    assert times["prefill_end_ns"].middle_ns == RECEIVED_NS + 500_000_000
    times = read_request(request(first_token_latency=0.503, request_received_ts=None)).times
    assert times["first_token_ns"].middle_ns == RECEIVED_NS + 500_000_000


def test_a_whole_request() -> None:
    news = read_request(request())
    assert (news.id, news.internal, news.finished, news.keys) == ("a1b2", False, True, ())
    start = RECEIVED_NS
    assert {name: m.middle_ns - start for name, m in news.times.items()} == {
        "arrival_ns": 0,
        "scheduled_ns": 125_000_000,
        "prefill_start_ns": 125_000_000,
        "prefill_end_ns": 500_000_000,
        "first_token_ns": 500_000_000,
    }
    assert dict(news.tokens) == {
        "prompt_tokens": 1997,
        "device_hit_tokens": 131,
        "host_hit_tokens": 257,
        "storage_hit_tokens": 521,
        "computed_tokens": 1997 - 909,
    }


@pytest.mark.parametrize(
    ("details", "tiers"),
    [
        ({"storage": 909, "storage_backend": "x"}, (0, 0, 909)),
        ({"device": 909}, (909, 0, 0)),
        ({"device": 131, "host": 257}, (131, 257, None)),  # the rest is somebody's
        ({"device": 131, "host": "257", "storage": -1}, (131, None, None)),
        ({}, (None, None, None)),
        (None, (None, None, None)),
        ([131, 257], (None, None, None)),
    ],
)
def test_tiers(details: object, tiers: tuple[int | None, ...]) -> None:
    tokens = read_request(request(cached_tokens_details=details)).tokens
    names = ("device_hit_tokens", "host_hit_tokens", "storage_hit_tokens")
    assert tuple(tokens.get(name) for name in names) == tiers
    assert tokens["computed_tokens"] == 1997 - 909


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"forward_entry_time": None}, {"scheduled_ns", "prefill_start_ns"}),
        ({"forward_entry_time": 0.0}, {"scheduled_ns", "prefill_start_ns"}),
        ({"prefill_finished_time": float("nan")}, {"prefill_end_ns", "first_token_ns"}),
        ({"prefill_finished_time": float("inf")}, {"prefill_end_ns", "first_token_ns"}),
        ({"request_received_ts": "now"}, {"arrival_ns"}),
        ({"request_received_ts": -1.0}, {"arrival_ns"}),
        ({"prompt_tokens": "1997"}, {"prompt_tokens", "computed_tokens"}),
        ({"prompt_tokens": 17}, {"computed_tokens"}),  # fewer than were found
        ({"cached_tokens": None}, {"computed_tokens"}),
    ],
)
def test_what_is_damaged_is_unknown(changed: dict[str, object], lost: set[str]) -> None:
    whole, news = read_request(request()), read_request(request(**changed))
    said = {*whole.times, *whole.tokens}
    assert said - {*news.times, *news.tokens} == lost


@pytest.mark.parametrize("line", [{}, {"id": 7}, {"id": ""}, {"id": "x" * 513}, {"id": None}])
def test_what_names_no_request_is_refused(line: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        read_request(line)


# ---------------------------------------------------------------- log


STAMP = "[2026-12-01 17:26:40 TP3] "


@pytest.mark.parametrize(
    ("line", "name", "tokens"),
    [
        ("HiCache prefetch success req=a1b2 completed=523 matched=131 loaded=392 occupied=17",
         "a1b2", 392),
        ("HiCache prefetch success req=a1b2 completed_local=523 completed_synced=521 matched=131 "
         "loaded=390 tail_release=2 occupied=11008", "a1b2", 390),
        ("HiCache prefetch dropped req=a1b2 completed=523 matched=131 loaded=392 occupied=17",
         "a1b2", 0),
        ("HiCache prefetch fill committed req=a1b2 filled=523 occupied=17 locked=3", "a1b2", 523),
        ("HiCache prefetch declined req=a1b2 reason=unservable_prefix device_prefix=0 hit=17",
         "a1b2", 0),
        ("Prefetch 0c34259f completed with 523 tokens", "0c34259f", 523),
        ("HiCache prefetch success req=cmpl-x-0 completed=0 matched=0 loaded=0", "cmpl-x-0", 0),
    ],
)  # fmt: skip
def test_prefetches(line: str, name: str, tokens: int) -> None:
    (news,) = news_of(STAMP + line)
    assert (news.id, dict(news.tokens)) == (name, {"storage_hit_tokens": tokens})
    assert (news.times, news.internal, news.finished) == ({}, False, False)


@pytest.mark.parametrize(
    "line",
    [
        "HiCache prefetch declined req= reason=unservable_prefix",
        "HiCache prefetch fill committed req=a1b2 filled= occupied=17 locked=3",
        "HiCache prefetch dropped 523-token refill under un-backed-up node 17",
        "HiCache prefetch success req= completed=523 matched=131 loaded=392 occupied=17",
        "HiCache prefetch success req=a1b2 completed=523 matched=131 loaded=",
        "HiCache prefetch success req=a1b2 completed=523 matched=131 loaded=3x",
        "HiCache prefetch success req=a1b2 completed=-1 matched=131 loaded=392 occupied=17",
        "HiCache prefetch success req=a1b2 completed=9999999999999 matched=1 loaded=1 occupied=1",
        "HiCache prefetch success req=a1b2 completed_local=1 matched=131 loaded=392 occupied=17",
        "Prefetch completed with 523 tokens",
        "Prefetch operation a1b2 failed to retrieve page 19581e27",
        "Prefetch a1b2 completed with many tokens",
    ],
)
def test_other_lines(line: str) -> None:
    assert news_of(STAMP + line) == []


# ---------------------------------------------------------------- spans, metrics


def root_span(**changed: object) -> Span:
    attributes = {
        "rid": "a1b2",
        "module": "sglang::request",
        "gen_ai.request.id": "a1b2",
        "gen_ai.usage.prompt_tokens": 1997,
        "gen_ai.usage.cached_tokens": 909,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.latency.time_to_first_token": 0.503,
        "gen_ai.latency.time_in_model_prefill": 0.49,
        "gen_ai.latency.e2e": 0.75,
    } | changed
    start = RECEIVED_NS
    return Span(" Req a1b2", start, start + 750_000_000, attributes)


def test_a_root_span() -> None:
    news = read_span(root_span())
    assert news is not None and news.finished
    assert {name: m.middle_ns - RECEIVED_NS for name, m in news.times.items()} == {
        "arrival_ns": 0,
        "first_token_ns": 503_000_000,
    }
    assert dict(news.tokens) == {"prompt_tokens": 1997, "computed_tokens": 1088}


def test_span_and_file_are_one_request() -> None:
    span, file = read_span(root_span()), read_request(request())
    assert span is not None
    for order in ((span, file), (file, span)):
        found = row(*order)
        assert (found["storage_hit_tokens"], found["computed_tokens"]) == (521, 1088)
        assert found["prefill_start_ns"] == RECEIVED_NS + 125_000_000


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"module": "other"},
        {"rid": "a1b2"},
        {"module": "sglang::request", "rid": 7},
        {"module": "sglang::request", "rid": "x" * 513},
        {"gen_ai.request.id": "cmpl-a-0", "gen_ai.usage.prompt_tokens": 17},  # vLLM's
    ],
)
def test_other_spans(attributes: dict[str, Any]) -> None:
    assert read_span(Span("prefill_forward", 1, 2, attributes)) is None


def test_a_root_span_of_an_aborted_request() -> None:
    news = read_span(root_span(**{"gen_ai.latency.time_to_first_token": "?"}))
    assert news is not None and set(news.times) == {"arrival_ns"}


def test_metrics_that_matter() -> None:
    assert sglang.ENGINE.metrics is not None
    keep = sglang.ENGINE.metrics.keep
    for name in (
        "sglang:storage_prefetch_hit_tokens_total",
        "sglang:prefetch_bandwidth_sum",
        "sglang:cached_tokens_total",
        "sglang:hicache_host_used_tokens",
    ):
        assert keep.match(name), name
    for name in ("sglang:prefetch_bandwidth_bucket", "sglang:gen_throughput", "vllm:x"):
        assert not keep.match(name), name


# ---------------------------------------------------------------- processes


def process(*arguments: str, name: str = "python3", log: str | None = None, **env: str) -> Process:
    return Process(17, 1, name, arguments, env, "/srv", log)


LAUNCH = ("/srv/venv/bin/python3", "-m", "sglang.launch_server")


def test_a_server_with_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = detect(
        process(
            *LAUNCH,
            *("--model-path", str(tmp_path), "--tp", "2", "--page-size", "67"),
            *("--port", "31001", "--enable-metrics", "--export-metrics-to-file"),
            *("--export-metrics-to-file-dir", "metrics", "--enable-trace"),
            *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
            *("--hicache-storage-prefetch-policy=wait_complete",),
            log="/srv/logs/sglang.log",
            SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR="/srv/kv/sgl",
        )
    )
    assert found is not None
    assert (
        found.shape == "pages of 67 tokens, TP 2, HiCache with file storage, prefetch wait_complete"
    )
    assert found.roots == ("/srv/kv/sgl",)
    assert found.signals == (
        SignalPlace("files", "/srv/metrics"),
        SignalPlace("metrics", "http://127.0.0.1:31001/metrics"),
        SignalPlace("otlp", "4317"),
        SignalPlace("log", "/srv/logs/sglang.log"),
    )
    assert found.advice == ()
    assert found.facts == EngineFacts(
        "sglang",
        model=str(tmp_path),
        unit_tokens=67,
        unit_bytes=67 * RANK_BYTES,
        bytes_per_token=2 * RANK_BYTES,
        reads_in_flight=1,
        direct=False,
        root="/srv/kv/sgl",
        prefetch=True,
    )


def test_a_server_with_nothing_is_given_advice() -> None:
    found = detect(process("sglang", "serve", "--model-path", "/none", name="sglang"))
    assert found is not None
    assert (found.shape, found.roots, found.signals) == ("no HiCache", (), ())
    assert len(found.advice) == 1 and "--export-metrics-to-file-dir DIR" in found.advice[0]
    found = detect(process(*LAUNCH, "--hicache-storage-backend", "file"))
    assert found is not None and len(found.advice) == 2
    found = detect(process(*LAUNCH, "--config", "server.yaml"))
    assert found is not None and found.advice == ()


@pytest.mark.parametrize(
    ("backend", "extra", "environment", "roots", "direct"),
    [
        ("file", "", {}, ("/tmp/hicache",), False),
        ("file", '{"file_storage_path": "kv/a"}', {}, ("/srv/kv/a",), False),
        ("file", '{"prefetch_threshold": 17}', {}, ("/tmp/hicache",), False),
        (
            "file",
            '{"file_storage_path": "/a"}',
            {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/b"},
            ("/b",),
            False,
        ),
        ("file", "@extra.json", {}, ("/tmp/hicache",), False),
        ("nixl", "", {}, ("/tmp/hicache_storage",), True),
        (
            "nixl",
            "",
            {
                "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": "/a, /b/,",
                f"{'SGLANG'}_HICACHE_NIXL_USE_DIRECT_IO": "0",
            },
            ("/a", "/b"),
            False,
        ),
        ("mooncake", "", {}, (), None),
    ],
)
def test_storage(
    backend: str,
    extra: str,
    environment: dict[str, str],
    roots: tuple[str, ...],
    direct: bool | None,
) -> None:
    words = ("--hicache-storage-backend", backend, "--hicache-storage-backend-extra-config", extra)
    found = detect(process(*LAUNCH, *words, **environment))
    assert found is not None and found.facts is not None
    assert found.roots == roots
    assert (found.facts.direct, found.facts.prefetch) == (direct, True)
    assert found.facts.reads_in_flight == (1 if backend == "file" else None)


def test_a_folder_by_an_option() -> None:
    words = ("--hicache-storage-backend", "file", "--file-storage-path", "/srv/kv/o")
    found = detect(process(*LAUNCH, *words))
    assert found is not None and found.roots == ("/srv/kv/o",)


def test_extra_configuration_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_text('{"file_storage_path": "/srv/kv/x"}')
    words = ("--hicache-storage-backend", "file")
    extra = ("--hicache-storage-backend-extra-config", f"@{tmp_path}/extra.json")
    found = detect(process(*LAUNCH, *words, *extra))
    assert found is not None and found.roots == ("/srv/kv/x",)


@pytest.mark.parametrize(
    "arguments",
    [
        ("python3", "-m", "sglang.bench_serving", "--port", "1"),
        ("bash", "-c", "python3 -m sglang.launch_server"),
        ("docker", "run", "sglang", "serve"),
        ("sglang", "generate"),
        ("vllm", "serve", "sglang"),
        (),
    ],
)
def test_other_processes(arguments: tuple[str, ...]) -> None:
    assert detect(process(*arguments)) is None


def test_its_own_children_are_not_servers() -> None:
    assert detect(process(*LAUNCH)) is not None
    assert detect(process(*LAUNCH, name="sglang::schedul")) is None


# ---------------------------------------------------------------- settings


def test_settings_have_their_names() -> None:
    known = EngineFacts("sglang", unit_tokens=64, unit_bytes=64 * 2048)
    unit = sglang.translate("unit_bytes", 5 * 64 * 2048 + 7, known)
    assert (unit.name, unit.value, unit.live) == ("--page-size", str(5 * 64), False)
    assert sglang.translate("unit_bytes", 1, known).value == "64"
    by_token = sglang.translate("unit_bytes", 131 * 2048, EngineFacts("s", bytes_per_token=2048))
    assert by_token.value == "131"
    assert sglang.translate("unit_bytes", 1, EngineFacts("sglang")).value is None
    depth = sglang.translate("bytes_in_flight", 1 << 30, known)
    assert depth.name is None and depth.live is False
    assert "one thread" in depth.how and "128 pages" in depth.how
    ahead = sglang.translate("prefetch_horizon", 3, known)
    assert (ahead.name, ahead.value, ahead.live) == (
        "--hicache-storage-prefetch-policy",
        "timeout",
        True,
    )
    assert sglang.translate("prefetch_horizon", 0, known).value == "best_effort"
    assert "PUT /hicache/storage-backend" in ahead.how
    assert sglang.translate("read_ahead", 3, known).name is None
