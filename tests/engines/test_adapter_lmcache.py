"""LMCache: names of files, what it says of requests, its processes, its settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import KVPath, News, Process, RequestNews, RunningEngine, SignalPlace, Span
from kvprobe.clock import Moment
from kvprobe.engines import lmcache
from kvprobe.model import EngineFacts
from kvprobe.signals.combined import together_with
from kvprobe.signals.merge import RequestMerger
from tests.engines.small_model import MODEL, RANK_BYTES

DATA = Path(__file__).parents[1] / "data" / "engines" / "lmcache"
DONE = "Prefetch request completed (L1+L2):"
IDS = "external_request_id=a, prefetch_request_id=1)"
LOOKUPS = "lookup_hashes_20261201_172639_000000.jsonl"


recognise = lmcache.ENGINE.recognise


def detect(process: Process) -> RunningEngine | None:
    assert lmcache.ENGINE.detect is not None
    return lmcache.ENGINE.detect(process)


def moment(wall_ns: int) -> Moment:
    return Moment(wall_ns - 50, wall_ns + 50)


def news_of(line: str, written: Moment | None = None) -> list[RequestNews]:
    """What the log lines' readers make of one line."""
    found = []
    for kind in lmcache.ENGINE.log_lines:
        if kind.mark in line and (match := kind.pattern.search(line)):
            news = kind.read(match, written)
            assert isinstance(news, RequestNews)
            found.append(news)
    return found


def log(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def lookups() -> list[dict[str, Any]]:
    return [json.loads(line) for line in log(LOOKUPS)]


def read_lookup(line: Mapping[str, Any]) -> Sequence[News]:
    return lmcache.ENGINE.json_files[0].read(line, moment)


def spans() -> list[Span]:
    return [
        Span(s["name"], s["start"], s["end"], s["attributes"])
        for s in map(json.loads, log("spans.jsonl"))
    ]


def read_span(span: Span) -> RequestNews | None:
    assert lmcache.ENGINE.read_span is not None
    news = lmcache.ENGINE.read_span(span, moment)
    assert news is None or isinstance(news, RequestNews)
    return news


def rows(news: Sequence[News], unit_tokens: int | None = None) -> dict[str, dict[str, Any]]:
    merger = RequestMerger()
    for each in news:
        if isinstance(each, RequestNews):
            merger.take(each, 1, last_word=False)
    found, _ = merger.release(2, everything=True, unit_tokens=unit_tokens)
    return {row["id"]: row for row in found}


# ---------------------------------------------------------------- files


def test_recorded_paths_are_recognised_but_for_the_device() -> None:
    found = {path: recognise(path) for path in log("paths.txt")}
    kinds = Counter((p.temporary, p.shared) if p else None for p in found.values())
    assert kinds == {
        (False, False): 64 + 32 + 28,  # local_disk, fs_native, fs
        (True, False): 32 + 28,
        (False, True): 128,  # two pools of nixl_store
        None: 1,
    }
    assert [path for path, known in found.items() if known is None] == ["/srv/kv/l2/raw.img"]


def test_every_chunk_of_the_lookup_log_is_a_file() -> None:
    files = Counter(
        known.key
        for path in log("paths.txt")
        if path.startswith("/srv/kv/lmc/") and (known := recognise(path))
    )
    asked: set[str] = set()
    for line in lookups():
        (request,) = (n for n in read_lookup(line) if isinstance(n, RequestNews))
        assert len(request.keys) == len(line["chunk_hashes"])
        asked |= set(request.keys)
    assert len(asked) == 3 * 4 + 2 * 8
    assert asked == set(files)
    assert set(files.values()) == {2}, "one name while it is written, one after"


@pytest.mark.parametrize("path", [p for p in log("paths.txt") if "lmc/test-model" in p][::7])
def test_near_misses_of_the_server(path: str) -> None:
    assert recognise(path)
    for old, new in [
        ("@0x01000100@", "@01000100@"),
        ("@0x01000100@", "@0x0100010@"),
        ("@0x01000100@", "@0x01000100@g@"),
        ("@0@", "@"),
        ("test-model", ""),
        ("test-model", "a" * 200),
        (path[path.rindex(".") :], ".pt"),
        ("a", "A"),
        (".", ".0."),
    ]:
        assert recognise(path.replace(old, new)) is None, (old, new)


@pytest.mark.parametrize(
    "name",
    [
        "org-tiny@1@0@1c4291bc57b12753.pt",  # no type, and no format in front
        "org-tiny@1@0@1c4291bc57b12753@bfloat17.pt",
        "org-tiny@1@0@1c4291b@bfloat16.pt",
        "org-tiny@1@0@+1c4291bc57b12753@bfloat16.pt",
        "org-tiny@1@x@1c4291bc57b12753@bfloat16.pt",
        "org-tiny@1@0@1c4291bc57b12753@bfloat16.pth",
        "org-tiny@1@0@1c4291bc57b12753@bfloat16@tag.pt",
        "org-tiny@1@0@1c4291bc57b12753@bfloat16.pt.tmp",
        "1@0@1c4291bc57b12753@bfloat16.pt",
        "model.pt",
        "consolidated.00.pt",
        "someone@example.org.data",
        "obj_1_8920.bin.tmp",
        "obj_1_892.bin",
        "obj_x_8920.bin",
        "model_08030803_0_" + "ab" * 15 + ".bin",
        "model_0803080_0_" + "ab" * 32 + ".bin",
        "model_08030803_0_" + "ab" * 32 + ".bin.tmp.12",
        "pytorch_model.bin",
    ],
)
def test_near_misses(name: str) -> None:
    assert recognise(f"/srv/kv/{name}") is None
    assert recognise(name) is None


def test_folders_of_gds_files_are_digits_of_the_hash() -> None:
    name = "org%2Fmodel%401%400%401c4291bc57b12753%40half.kvcache.safetensors"
    hexadecimal, decimal = "1c/42", f"{int('1c4291bc57b12753', 16)}"
    for folder in (hexadecimal, f"{decimal[:2]}/{decimal[2:4]}"):
        assert recognise(f"/srv/kv/{folder}/{name}") == KVPath("1c4291bc57b12753")
    for folder in ("1c/43", "1d/42", "1c42", "", "42/1c"):
        assert recognise(f"/srv/kv/{folder}/{name}") is None
    assert recognise(f"/srv/kv/1c/42/{name.replace('%40', '@')}") is None


@given(
    st.text("abcXYZ0189.-_", min_size=1, max_size=40),
    st.binary(min_size=8, max_size=64),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 300),
    st.text("abcXYZ0189.-_", max_size=20),
)
def test_names_as_the_server_makes_them(
    model: str, digest: bytes, rank: int, group: int, salt: str
) -> None:
    stem = f"{model}@{rank:#010x}@{group:x}@{digest.hex()}" + (f"@{salt}" if salt else "")
    assert recognise(f"/srv/{stem}.data") == KVPath(digest.hex())
    assert recognise(f"/srv/{stem}.tmp") == KVPath(digest.hex(), temporary=True)


@given(st.text("@_-%0a.:/ \n", max_size=300))
def test_no_path_raises(text: str) -> None:
    for path in (text, text + ".data", text + ".pt", "1c/42/" + text + "%40.weka1"):
        known = recognise(path)
        assert known is None or known.key in path


def test_a_files_size_is_a_fact(tmp_path: Path) -> None:
    assert lmcache.facts(str(tmp_path)) is None
    assert lmcache.facts(str(tmp_path / "none")) is None
    sizes = {"05" * 32: 917, "13" * 32: 4099, "1e" * 32: 257}
    for key, size in sizes.items():
        (tmp_path / f"m@0x02000200@0@{key}.data").write_bytes(bytes(size))
    (tmp_path / f"m@0x02000200@0@{'2f' * 32}.tmp").write_bytes(bytes(8191))
    (tmp_path / "other.data").write_bytes(bytes(16381))
    assert lmcache.facts(str(tmp_path)) == EngineFacts(
        "lmcache", unit_bytes=4099, root=str(tmp_path)
    )


# ---------------------------------------------------------------- lookup-hash log


def test_file_names_of_the_lookup_log() -> None:
    names = lmcache.ENGINE.json_files[0].names
    assert names.fullmatch(LOOKUPS)
    assert names.fullmatch("lookup_hashes_20260401_143025_1000003.jsonl")
    for other in (LOOKUPS + ".gz", "x" + LOOKUPS, "lookup_hashes.jsonl", "events.jsonl"):
        assert names.fullmatch(other) is None


def test_a_recorded_lookup() -> None:
    facts, request = read_lookup(lookups()[0])
    assert facts == EngineFacts(
        "lmcache", model="test-model", unit_tokens=256, unit_bytes=2 * 4 * 256 * 128 * 2
    )
    assert isinstance(request, RequestNews)
    assert (request.id, request.internal, request.finished) == ("req-0-cold", False, False)
    assert request.tokens == {"prompt_tokens": 1025}
    assert request.times["scheduled_ns"].middle_ns == 1796145999_591562748, "of 1796145999.5915627"
    assert request.keys[2] == "052ad337a0f3dc32754b83167d1a4ca258201d7119e6904e6a382e2079e75730"


def lookup(**changed: object) -> dict[str, object]:
    return {
        "timestamp": 1796145999.25,
        "request_id": "cmpl-a-0-9b2bc980",
        "model_name": "m",
        "chunk_size": 131,
        "seq_len": 917,
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3, 131, 64]],
        "chunk_hashes": ["0x" + "ab" * 32],
    } | changed


def test_only_ids_that_end_like_vllms_are_internal() -> None:
    for name, internal in [
        ("cmpl-a-0-9b2bc980", True),
        ("cmpl-a-0", False),
        ("req-0-cold", False),
        ("a-9B2BC980", False),
        ("-9b2bc980", False),
        ("a-9b2bc9801", False),
    ]:
        (_, news) = read_lookup(lookup(request_id=name))
        assert isinstance(news, RequestNews)
        assert news.internal == internal, name


@pytest.mark.parametrize(
    ("dtypes", "shapes", "size"),
    [
        (["torch.float8_e4m3fn"], [[3, 131, 576]], 3 * 131 * 576),
        (["torch.float32"], [[2, 131, 8]], 2 * 131 * 8 * 4),
        (["torch.float4_e2m1"], [[2, 131, 8]], None),
        (["half", "half"], [[2, 131, 8], [2, 131, 4]], None),
        ([], [], None),
        (["half"], [[2, 0, 8]], None),
    ],
)
def test_bytes_of_a_chunk(dtypes: list[str], shapes: list[list[int]], size: int | None) -> None:
    facts = read_lookup(lookup(dtypes=dtypes, shapes=shapes))[0]
    assert isinstance(facts, EngineFacts)
    assert facts.unit_bytes == size


def test_a_lookup_without_an_id_tells_of_the_engine() -> None:
    (facts,) = read_lookup(lookup(request_id=""))
    assert isinstance(facts, EngineFacts)


@pytest.mark.parametrize(
    "changed",
    [
        {"timestamp": float("nan")},
        {"timestamp": float("inf")},
        {"timestamp": "soon"},
        {"timestamp": 0},
        {"request_id": 7},
        {"request_id": "x" * 513},
        {"chunk_size": 0},
        {"chunk_size": True},
        {"chunk_size": 256.0},
        {"seq_len": -1},
        {"seq_len": None},
        {"chunk_hashes": ["ab" * 32]},
        {"chunk_hashes": ["0x"]},
        {"chunk_hashes": ["0xAB"]},
        {"chunk_hashes": [17]},
        {"chunk_hashes": None},
        {"dtypes": None},
        {"dtypes": [None]},
        {"shapes": [["2"]]},
        {"shapes": [7]},
    ],
)
def test_a_damaged_lookup_is_refused(changed: dict[str, object]) -> None:
    expected = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
    with pytest.raises(expected):
        read_lookup(lookup(**changed))


@pytest.mark.parametrize("missing", list(lookup()))
def test_a_lookup_with_a_field_missing_is_refused(missing: str) -> None:
    with pytest.raises(KeyError):
        read_lookup({name: value for name, value in lookup().items() if name != missing})


# ---------------------------------------------------------------- log of the server


def test_a_recorded_log_of_the_server() -> None:
    found = [news for line in log("server.log") for news in news_of(line, moment(1000_000_000))]
    hits = [(n.id, dict(n.units), n.of_units) for n in found if n.units]
    names = ("host_hit_tokens", "storage_hit_tokens")
    assert hits == [
        (f"req-{k}-warm", dict(zip(names, at, strict=True)), sum(at))
        for k, at in [(0, (4, 0)), (1, (4, 0)), (2, (4, 0)), (10, (0, 8)), (11, (0, 8))]
    ]
    assert len(found) == 5 + 10 + 5, "hits; look-ups, and those that found nothing, at DEBUG"
    assert {n.id for n in found} == {line["request_id"] for line in lookups()}


def test_log_lookups_and_spans_agree_on_hits() -> None:
    """Counts in files by the log are the tokens that the spans say."""
    asked = [news for line in lookups() for news in read_lookup(line)]
    (facts,) = {f for f in asked if isinstance(f, EngineFacts)}
    by_log = rows(
        asked + [n for line in log("server.log") for n in news_of(line)], facts.unit_tokens
    )
    by_span = rows([n for span in spans() if (n := read_span(span))])
    assert len(by_log) == len(by_span) == 10
    for name, row in by_span.items():
        warm, long = name.endswith("warm"), name.startswith("req-1") and len(name) == 11
        for column, expected in (
            ("host_hit_tokens", 4 * 256 if warm and not long else 0),
            ("storage_hit_tokens", 8 * 256 if warm and long else 0),
        ):
            assert row[column] == expected
            assert by_log[name][column] == expected


def test_a_lookup_began_when_log_and_spans_say_too() -> None:
    begun = {line["request_id"]: line["timestamp"] * 1e9 for line in lookups()}
    for span in spans():
        news = read_span(span)
        if news:
            assert abs(news.times["scheduled_ns"].middle_ns - begun[news.id]) < 2e6
    (line,) = (text for text in log("server.log") if DONE in text and "=req-10-warm" in text)
    (news,) = news_of(line, moment(1796146045_630000000))
    wide = news.times["scheduled_ns"]
    assert wide.middle_ns == 1796146045_630000000 - 60_700_000
    assert wide.uncertainty_ns == 50 + 50_000, "the duration is printed in tenths of a ms"
    assert abs(wide.middle_ns - begun["req-10-warm"]) < 5e6


def test_ids_of_vllm_join_and_ranks_are_one() -> None:
    line = (
        "[2026-12-01 17:26:40,258] LMCache INFO: Prefetch request completed (L1+L2): 20/28 "
        "retained keys (8 L1, 12 L2) in 38.6 ms (external_request_id=cmpl-lm3-0-9b2bc980, "
        "prefetch_request_id=7) (storage_manager.py:651:lmcache.v1.distributed.storage_manager)"
    )
    outer = RequestNews(
        "cmpl-lm3-0", tokens={"prompt_tokens": 7 * 131 + 17, "device_hit_tokens": 0}
    )
    found = rows([*news_of(line), outer], unit_tokens=131)
    assert list(found) == ["cmpl-lm3-0"]
    row = found["cmpl-lm3-0"]
    assert (row["host_hit_tokens"], row["storage_hit_tokens"]) == (2 * 131, 3 * 131)
    assert row["computed_tokens"] == 2 * 131 + 17


@pytest.mark.parametrize(
    "line",
    [
        f"{DONE} 3/3 retained keys (3 L1, 0 L2) in 0.6 ms (prefetch_request_id=-1)",
        f"{DONE} 4/4 prefix hits",
        f"{DONE} 4/4 retained keys (4 L1, 0 L2) in 57.4 ms (external_",
        f"{DONE} x/4 retained keys (4 L1, 0 L2) in 57.4 ms ({IDS}",
        f"{DONE} 4/4 retained keys (4 L1, 0 L2) in 57.4 ms ({IDS.replace('=a', '=')}",
        f"{DONE} 4/4 retained keys (-4 L1, 0 L2) in 57.4 ms ({IDS}",
        f"{DONE} 4/4 retained keys (99999999999999 L1, 0 L2) in 57.4 ms ({IDS}",
        "Retrieved 2048 tokens in 0.019 seconds",
        "Stored 1024 tokens in 0.007 seconds",
        "MP lookup/prefetch start: session=",
    ],
)
def test_lines_of_the_server_that_name_no_request(line: str) -> None:
    assert news_of(line) == []


# ---------------------------------------------------------------- log in-process


def test_a_recorded_log_in_process() -> None:
    found = [news for line in log("in-process.log") for news in news_of(line)]
    assert [(n.id, dict(n.tokens)) for n in found] == [
        (f"req-{k}-again", {"offload_hit_tokens": 2048}) for k in (0, 1, 7)
    ]
    assert sum("Stored" in line for line in log("in-process.log")) == 8


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        (
            "Total tokens 1997, Inference Engine computed tokens: 257, LMCache hit tokens: 1279, "
            "need to load: 1022",
            (1997, 1022, 257),
        ),
        ("Total tokens 1997, LMCache hit tokens: 1279, need to load: 1279", (1997, 1279, None)),
        (
            "Total tokens 1997, Inference Engine computed tokens: 521, LMCache hit tokens: 257, "
            "need to load: -264",
            (1997, 0, 521),
        ),
        (
            "Total tokens 1997, Inference Engine computed tokens: 0, LMCache hit tokens: 131, "
            "but need to load: 131 < min_retrieve 257, skip retrieve but record for save skip",
            (1997, 0, 0),
        ),
    ],
)
def test_hits_in_process(said: str, tokens: tuple[int, int, int | None]) -> None:
    written = moment(7_000_000_000)
    prefix = "\x1b[36m(EngineCore_DP0 pid=31)\x1b[0m [2026-12-01 17:36:39,508] LMCache INFO: "
    (news,) = news_of(
        f"{prefix}Reqid: cmpl-x-0-9b2bc980, {said} (vllm_v1_adapter.py:1477)", written
    )
    prompt, loaded, device = tokens
    expected = {"prompt_tokens": prompt, "offload_hit_tokens": loaded}
    if device is not None:
        expected["device_hit_tokens"] = device
    assert (news.id, news.internal, dict(news.tokens)) == ("cmpl-x-0-9b2bc980", True, expected)
    assert news.times == {"scheduled_ns": written}
    assert news.finished is False


def test_a_stamp_of_whole_seconds_is_no_time_of_a_lookup() -> None:
    second = Moment(7_000_000_000, 7_999_999_999)
    for line in log("server.log"):
        assert all(not news.times for news in news_of(line, second))


@pytest.mark.parametrize(
    "line",
    [
        "Reqid: a, Total tokens 17, Inference Engine computed tokens: 0, LMCache hit tokens: None.",
        "Reqid: a, Total tokens , LMCache hit tokens: 3, need to load: 3",
        "Reqid: a b, Total tokens 17, LMCache hit tokens: 3, need to load: 3",
        "Reqid: a, Total tokens 17, LMCache hit tokens: 3, need to load: ",
        "[req_id=a] Stored 2048 out of total 2048 tokens. size: 0.0039 GB, cost 10.1144 ms",
        "Retrieved 2048 out of 2048 required tokens (from 2048 total tokens). size: 0.0039 gb",
        "[req_id=] Retrieved 2048 out of 2048 required tokens (from 2048 total tokens).",
        "[req_id=a] Retrieved -1 out of 2048 required tokens (from 2048 total tokens).",
        "[req_id=a] Retrieved 2048 tokens",
    ],
)
def test_lines_in_process_that_say_nothing_of_a_request(line: str) -> None:
    assert news_of(line) == []


def test_layers_are_retrieved_too() -> None:
    (news,) = news_of("[req_id=r-1] Retrieved 1021 out of 1024 out of total 2048 tokens")
    assert dict(news.tokens) == {"offload_hit_tokens": 1021}


# ---------------------------------------------------------------- spans, metrics


def test_recorded_spans() -> None:
    found = [news for span in spans() if (news := read_span(span))]
    assert Counter(n.finished for n in found) == {True: 10, False: 10}
    assert Counter(span.name for span in spans()) == {
        "request": 10,
        "mp.lookup_prefetch": 10,
        "mp.store": 5,
        "mp.retrieve": 5,
    }


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"session_id": "a", "l1_hit_tokens": 3},
        {"session_id": "a", "l1_hit_tokens": "x", "l2_hit_tokens": 3},
        {"session_id": "a", "l1_hit_tokens": -3, "l2_hit_tokens": 3},
        {"session_id": "", "l1_hit_tokens": 3, "l2_hit_tokens": 3},
        {"session_id": 7, "l1_hit_tokens": 3, "l2_hit_tokens": 3},
        {"session_id": "a", "l1_hit_tokens": float("inf"), "l2_hit_tokens": 3},
    ],
)
def test_other_spans_called_request_say_nothing(attributes: dict[str, Any]) -> None:
    assert read_span(Span("request", 1, 2, attributes)) is None


def test_metrics_that_matter() -> None:
    assert lmcache.ENGINE.metrics is not None
    keep = lmcache.ENGINE.metrics.keep
    for name in (
        "lmcache_mp_lookup_hit_l2_tokens_total",
        "lmcache_mp_l2_load_throughput_GB_per_second_sum",
        "lmcache_mp_num_inflight_l2_loads",
        "lmcache:num_hit_tokens_total",
        "lmcache:time_to_retrieve_sum",
    ):
        assert keep.match(name), name
    for name in (
        "lmcache_mp_l2_load_throughput_GB_per_second_bucket",
        "lmcache_mp_l2_load_completed_created",
        "lmcache_mp_real_reuse_gap_seconds_sum",
        "lmcache_mp_event_bus_queue_depth",
        "vllm:lmcache_mp_lookup_duration_seconds_sum",
    ):
        assert not keep.match(name), name


# ---------------------------------------------------------------- processes


def process(*arguments: str, name: str = "python3", log: str | None = None, **env: str) -> Process:
    return Process(17, 1, name, arguments, env, "/srv", log)


def test_a_server_with_everything() -> None:
    found = detect(
        process(
            "/srv/venv/bin/python3",
            "/srv/venv/bin/lmcache",
            "server",
            "--port",
            "15556",
            "--http-port=18200",
            "--http-host",
            "127.0.0.1",
            "--chunk-size",
            "131",
            "--l1-size-gb",
            "3",
            "--l2-adapter",
            '{"type": "fs_native", "base_path": "kv/a", "num_workers": 7, "use_odirect": true}',
            "--lookup-hash-log-dir",
            "/srv/hashes",
            log="/srv/logs/lmcache.log",
        )
    )
    assert found is not None
    assert found.roots == ("/srv/kv/a",)
    assert found.signals == (
        SignalPlace("files", "/srv/hashes"),
        SignalPlace("log", "/srv/logs/lmcache.log"),
        SignalPlace("metrics", "http://127.0.0.1:18200/metrics"),
    )
    assert found.advice == ()
    assert found.facts == EngineFacts(
        "lmcache", unit_tokens=131, reads_in_flight=7, direct=True, root="/srv/kv/a"
    )
    assert found.shape == "server, chunks of 131 tokens, storage fs_native, 3 GB of memory"


def test_a_server_with_nothing_is_given_advice() -> None:
    found = detect(process("lmcache", "server", name="lmcache"))
    assert found is not None
    assert found.roots == ()
    assert found.signals == (SignalPlace("metrics", "http://127.0.0.1:8080/metrics"),)
    assert "--lookup-hash-log-dir DIR" in found.advice[0]
    assert "log" in found.advice[1]
    assert found.facts == EngineFacts("lmcache", unit_tokens=256)


@pytest.mark.parametrize(
    ("endpoint", "tracing", "place"),
    [
        ("http://127.0.0.1:14317", True, "14317"),
        ("http://localhost", True, "4317"),
        ("http://127.0.0.1:14317", False, None),
        ("http://10.0.0.7:4317", True, None),
    ],
)
def test_metrics_are_pushed_where_there_is_an_endpoint(
    endpoint: str, tracing: bool, place: str | None
) -> None:
    words = ["lmcache", "server", "--otlp-endpoint", endpoint]
    found = detect(process(*words, *["--enable-tracing"] * tracing))
    assert found is not None
    assert found.signals == ((SignalPlace("otlp", place),) if place else ())


@pytest.mark.parametrize(
    ("adapters", "roots", "reads", "direct"),
    [
        (['{"type":"fs","base_path":"/a"}'], ("/a",), 1, False),
        (['{"type":"fs_native","base_path":"/a"}'], ("/a",), 4, False),
        (['{"type":"raw_block","device_path":"/dev/nvme9n1"}'], ("/dev/nvme9n1",), 4, True),
        (
            ['{"type":"raw_block","device_path":"/dev/b","io_engine":"io_uring"}'],
            ("/dev/b",),
            None,
            True,
        ),
        (
            ['{"type":"nixl_store","backend":"POSIX","backend_params":{"file_path":"/n"}}'],
            ("/n",),
            None,
            None,
        ),
        (
            ['{"type":"fs","base_path":"/a"}', '{"type":"fs","base_path":"/b"}'],
            ("/a", "/b"),
            None,
            None,
        ),
        (["{not json", '{"type": 7, "base_path": 8, "backend_params": []}'], (), None, None),
    ],
)
def test_storage_of_a_server(
    adapters: list[str], roots: tuple[str, ...], reads: int | None, direct: bool | None
) -> None:
    words = [word for text in adapters for word in ("--l2-adapter", text)]
    found = detect(process("lmcache", "server", *words))
    assert found is not None and found.facts is not None
    assert found.roots == roots
    assert (found.facts.reads_in_flight, found.facts.direct) == (reads, direct)
    assert found.facts.root == (roots[0] if roots else None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("lmcache", "bench", "server", "--mode", "cpu"),
        ("lmcache",),
        ("sudo", "lmcache", "server"),
        ("bash", "-c", "lmcache server"),
        ("docker", "exec", "lmcache", "server"),
        ("vllm", "serve", "m"),
        ("python3", "-m", "lmcache.v1.multiprocess.token_hasher"),
        (),
    ],
)
def test_other_processes(arguments: tuple[str, ...]) -> None:
    assert detect(process(*arguments)) is None


def test_a_server_started_as_a_module() -> None:
    words = ("python3", "-m", "lmcache.v1.multiprocess.http_server", "--chunk-size", "131")
    found = detect(process(*words))
    assert found is not None and found.facts is not None
    assert found.facts.unit_tokens == 131


def test_in_process_with_a_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "# a comment\nchunk_size: 131  # tokens\nlocal_cpu: false\n"
        'local_disk: "file:///srv/kv/a, /srv/kv/b"\nmax_local_disk_size: 7.0\n'
        "remote_url: 'fs://host:1/srv/kv/remote'\n"
        'extra_config: {"use_odirect": true}\n'
        "nested:\n  chunk_size: 17\nchunk_size 19\n"
    )
    found = detect(
        process(
            "/srv/venv/bin/vllm",
            "serve",
            str(tmp_path / "model"),
            "-tp",
            "2",
            "--kv-transfer-config",
            '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
            name="vllm",
            log="/srv/logs/vllm.log",
            LMCACHE_CONFIG_FILE=str(file),
        )
    )
    assert found is not None
    assert found.shape == "in-process, chunks of 131 tokens"
    assert found.roots == ("/srv/kv/a", "/srv/kv/b", "/srv/kv/remote")
    assert found.signals == (SignalPlace("log", "/srv/logs/vllm.log"),)
    assert len(found.advice) == 1 and "LMCacheMPConnector" in found.advice[0]
    assert found.facts == EngineFacts(
        "lmcache",
        model=str(tmp_path / "model"),
        unit_tokens=131,
        unit_bytes=131 * RANK_BYTES,
        bytes_per_token=2 * RANK_BYTES,
        direct=True,
        root="/srv/kv/a",
    )


def test_in_process_by_environment() -> None:
    environment = {"LMCACHE_LOCAL_DISK": "kv/lmd", "LMCACHE_CHUNK_SIZE": "257"}
    words = ("python3", "offline.py")
    found = detect(process(*words, **environment))
    assert found is not None and found.facts is not None
    assert found.roots == ("/srv/kv/lmd",)
    assert found.facts.unit_tokens == 257
    assert any("max_local_disk_size is 0" in advice for advice in found.advice)
    for other in (
        process("python3", "-c", "from multiprocessing.spawn import spawn_main", **environment),
        process("bash", "run.py", name="bash", **environment),
        process("bash", "serve", "--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1"}'),
        process("VLLM::EngineCore", name="VLLM::EngineCor", **environment),
        process(*words),
        process(
            "vllm",
            "serve",
            "m",
            "--kv-transfer-config",
            '{"kv_connector":"LMCacheMPConnector"}',
            **environment,
        ),
    ):
        assert detect(other) is None


def test_the_connectors_own_settings_go_first() -> None:
    connector = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {
            "lmcache.chunk_size": 131,
            "lmcache.local_disk": "/srv/kv/c",
            "lmcache.max_local_disk_size": 7,
            "lmcache.extra_config": {"use_odirect": True},
            "other": 1,
        },
    }
    words = ("vllm", "serve", "m", "--kv-transfer-config", json.dumps(connector))
    found = detect(process(*words, LMCACHE_CHUNK_SIZE="257", LMCACHE_LOCAL_DISK="/srv/kv/e"))
    assert found is not None and found.facts is not None
    assert found.roots == ("/srv/kv/c",)
    assert (found.facts.unit_tokens, found.facts.direct) == (131, True)
    assert len(found.advice) == 2


def test_in_process_in_sglang_and_among_several() -> None:
    assert detect(process("python3", "-m", "sglang.launch_server", "--enable-lmcache"))
    several = {"kv_connector": "MultiConnector", "x": [{"kv_connector": "LMCacheConnectorV1"}]}
    words = ("vllm", "serve", "m", "--kv-transfer-config", json.dumps(several))
    assert detect(process(*words, LMCACHE_CONFIG_FILE="/no/such/file")) is not None


# ---------------------------------------------------------------- settings


def test_settings_have_their_names() -> None:
    known = EngineFacts("lmcache", unit_tokens=256, unit_bytes=256 * 2048)
    unit = lmcache.translate("unit_bytes", 5 * 256 * 2048 + 7, known)
    assert (unit.name, unit.value, unit.live) == ("--chunk-size", str(5 * 256), False)
    assert lmcache.translate("unit_bytes", 1, known).value == "256"
    by_token = lmcache.translate("unit_bytes", 1000 * 2048, EngineFacts("l", bytes_per_token=2048))
    assert by_token.value == str(1000 // 16 * 16)
    assert lmcache.translate("unit_bytes", 1, EngineFacts("lmcache")).value is None
    depth = lmcache.translate("bytes_in_flight", 7 * 256 * 2048 + 99, known)
    assert (depth.name, depth.value) == ("num_workers", "7")
    for word in (
        "fs_native",
        "0.5.6",
        "num_load_workers",
        "iouring_queue_depth",
        "disk_io_threads",
    ):
        assert word in depth.how
    ahead = lmcache.translate("prefetch_horizon", 3, known)
    assert ahead.name is None and "--l2-prefetch-max-in-flight" in ahead.how
    assert lmcache.translate("read_ahead", 3, known).name is None


def test_facts_of_lookups_go_with_what_the_process_shows() -> None:
    running = detect(process("lmcache", "server", "--l2-adapter", '{"type":"fs","base_path":"/a"}'))
    assert running is not None
    said = read_lookup(lookups()[0])[0]
    assert isinstance(said, EngineFacts)
    whole = together_with(running.facts, said)
    assert (whole.reads_in_flight, whole.unit_bytes, whole.root) == (1, 524288, "/a")
