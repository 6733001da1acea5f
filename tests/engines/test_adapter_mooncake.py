"""Mooncake Store: names of files, its log and metrics, its processes, its settings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvprobe.adapter import KVPath, Process, RunningEngine, SignalPlace
from kvprobe.engines import mooncake
from kvprobe.model import EngineFacts

DATA = Path(__file__).parents[1] / "data" / "engines" / "mooncake"
HASH = "19581e27de7ced00ff1ce50b2047e7a567c76b1cbaebabe5ef03f7c3017bb5b7"

recognise = mooncake.recognise
detect = mooncake.detect


# ---------------------------------------------------------------- files


def test_recorded_paths() -> None:
    paths = (DATA / "paths.txt").read_text(encoding="utf-8").splitlines()
    found = {path: recognise(path) for path in paths}
    assert Counter(found.values())[None] == 20 + 1, "lists of objects, and the folder"
    buckets = {path: known for path, known in found.items() if known}
    assert len(buckets) == 21
    for path, known in buckets.items():
        assert known == KVPath(Path(path).stem, shared=True)
        assert path.endswith(".bucket")


@given(st.integers(1_500_000_000, 4_099_999_999), st.integers(0, (1 << 12) - 1))
def test_a_bucket_is_numbered_by_the_second(second: int, sequence: int) -> None:
    name = str(second << 12 | sequence)
    assert recognise(f"/srv/{name}.bucket") == KVPath(name, shared=True)
    name = f"{second * 1000 + sequence % 1000}-{sequence}"
    assert recognise(f"/srv/{name}.bucket") == KVPath(name, shared=True)


@pytest.mark.parametrize(
    "path",
    [
        "/srv/7357016891393.meta",
        "/srv/7357016891393.bucket.tmp",
        "/srv/735701689139.bucket",  # of 1975
        "/srv/73570168913930.bucket",  # of 2539
        "/srv/9223372036854775807.bucket",
        "/srv/07357016891393.bucket",
        "/srv/-7357016891393.bucket",
        "/srv/7357016891393-0.bucket",
        "/srv/1710000000000-.bucket",
        "/srv/17100000000000-0.bucket",
        "/srv/photos.bucket",
        "/srv/.bucket",
        "/srv/kv_cache.data",
        "/srv/kv_cache.meta",
        f"/srv/file_per_key_dir/a/q/{HASH}_k",
        f"/srv/file_per_key_dir/a/{HASH}_k",
        "/srv/file_per_key_dir/a/b/",
        "/srv/file_per_key_dir/ab/b/key",
        "/srv/other/a/b/key",
        "/srv/usr/a/b/readme.txt",
        f"/srv/other/a/b/{HASH}",
        f"/srv/other/a/b/{HASH[1:]}_k",
        f"/srv/other/a/b/{HASH}_3_q",
        f"/srv/other/a/b/m@tp_rank_0@{HASH}",
        f"/a/b/{HASH}_k",
        "a/b/key",
        "/srv/file_per_key_dir/a/b/" + "k" * 256,
    ],
)
def test_near_misses(path: str) -> None:
    assert recognise(path) is None


@given(st.sampled_from("abcdefghijklmnop"), st.sampled_from("abcdefghijklmnop"))
def test_one_file_a_key(first: str, second: str) -> None:
    keys = f"{HASH}_3_v", f"{HASH}_k", f"org_m@tp_rank_7@pcp0@dcp0@pp_rank_1@group_0@{HASH}"
    for name in (*keys, "tiny@tp_rank_0@pp_rank_0@0123456789abcdef"):
        for folder in ("file_per_key_dir", "mine"):
            assert recognise(f"/srv/{folder}/{first}/{second}/{name}") == KVPath(name)
    assert recognise(f"file_per_key_dir/{first}/{second}/any") == KVPath("any")


@given(st.text("ab/-_.\n0179", max_size=300))
def test_no_path_raises(text: str) -> None:
    for path in (text, text + ".bucket", "file_per_key_dir/a/b/" + text):
        known = recognise(path)
        assert known is None or known.key in path


# ---------------------------------------------------------------- log, metrics


def facts_of(line: str) -> list[object]:
    return [
        kind.read(match, None)
        for kind in mooncake.ENGINE.log_lines
        if kind.mark in line and (match := kind.pattern.search(line))
    ]


def test_a_recorded_log() -> None:
    lines = (DATA / "client-uring.log").read_text(encoding="utf-8").splitlines()
    assert [fact for line in lines for fact in facts_of(line)] == [
        EngineFacts("mooncake", reads_in_flight=32, direct=True)
    ]


@pytest.mark.parametrize("depth", ["", "0", "x", "-32", "3200000"])
def test_damaged_lines(depth: str) -> None:
    line = f"[SharedUringRing] thread-local ring initialised queue_depth={depth}"
    assert facts_of(line) == []
    assert facts_of("I1201 Master Admin Metrics: role=leader, state=serving") == []


def kept(name: str) -> dict[str, float]:
    assert mooncake.ENGINE.metrics is not None
    keep = mooncake.ENGINE.metrics.keep
    text = (DATA / name).read_text(encoding="utf-8")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if keep.match(sample.name)
    }


def test_metrics_that_matter() -> None:
    client = kept("client-metrics.txt")
    assert client["mooncake_ssd_read_bytes_total"] == 79 * (1 << 20)
    assert client["mooncake_ssd_read_ops_total"] == 79
    assert client["mooncake_ssd_read_latency_us_sum"] == 161556
    assert client["mooncake_ssd_write_ops_total"] == 127
    assert not [name for name in client if "summary" in name or "operation" in name]
    master = kept("master-metrics.txt")
    assert master["file_cache_hit_nums__total"] == 88, "the parser ends counters so"
    assert not [name for name in master if name.endswith("_bucket")]
    assert (len(client), len(master)) == (12, 16)


# ---------------------------------------------------------------- processes


def process(*arguments: str, name: str = "python3", log: str | None = None, **env: str) -> Process:
    return Process(17, 1, name, arguments, env, "/srv", log)


def found(
    *arguments: str, name: str = "python3", log: str | None = None, **env: str
) -> RunningEngine:
    running = detect(process(*arguments, name=name, log=log, **env))
    assert running is not None
    assert running.engine == "mooncake"
    return running


def test_a_master() -> None:
    words = ("mooncake_master", "--rpc_port=50071", "--metrics_port=19003", "--enable_offload=true")
    running = found(*words, name="mooncake_master")
    assert running.shape == "master"
    assert running.signals == (SignalPlace("metrics", "http://127.0.0.1:19003/metrics"),)
    assert (running.roots, running.facts) == ((), None)
    plain = found(
        "/srv/venv/bin/python3", "/srv/venv/bin/mooncake_master", "--enable_offload=false"
    )
    assert plain.shape == "master, no SSD offload"
    assert plain.signals == (SignalPlace("metrics", "http://127.0.0.1:9003/metrics"),)


def test_a_client_with_everything() -> None:
    running = found(
        *("mooncake_client", "--enable_offload", "--enable_http_server=true", "--http_port=19300"),
        name="mooncake_client",
        log="/srv/logs/client.log",
        MOONCAKE_OFFLOAD_FILE_STORAGE_PATH="/srv/kv/moon",
        MOONCAKE_OFFLOAD_USE_URING="true",
    )
    assert running.shape == "client, bucket storage, io_uring"
    assert running.roots == ("/srv/kv/moon",)
    assert running.signals == (
        SignalPlace("metrics", "http://127.0.0.1:19300/metrics"),
        SignalPlace("log", "/srv/logs/client.log"),
    )
    assert running.advice == ()
    assert running.facts == EngineFacts(
        "mooncake", reads_in_flight=32, direct=True, root="/srv/kv/moon"
    )


@pytest.mark.parametrize(
    ("environment", "reads", "direct", "advice"),
    [
        ({}, 1, False, 1),
        (
            {"STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend", "USE_URING": "1"},
            1,
            False,
            1,
        ),
        ({"STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend"}, 1, False, 2),
        ({"STORAGE_BACKEND_DESCRIPTOR": "distributed_storage_backend"}, None, None, 1),
        (
            {"STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend", "USE_URING": "true"},
            32,
            True,
            1,
        ),
    ],
)
def test_backends(
    environment: dict[str, str], reads: int | None, direct: bool | None, advice: int
) -> None:
    named = {f"MOONCAKE_OFFLOAD_{name}": value for name, value in environment.items()}
    running = found("mooncake_client", "--enable_offload=true", **named)
    assert running.facts == EngineFacts(
        "mooncake", reads_in_flight=reads, direct=direct, root="/data/file_storage"
    )
    assert len(running.advice) == advice
    assert "--enable_http_server=true" in running.advice[0]


def test_a_client_that_does_not_offload() -> None:
    for words in (("mooncake_client",), ("mooncake_client", "--enable_offload=false")):
        running = found(*words)
        assert (running.shape, running.roots, running.facts) == ("client, no SSD offload", (), None)


def test_an_engine_with_a_client_in_it() -> None:
    environment = {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "kv/moon"}
    running = found("python3", "-m", "sglang.launch_server", **environment)
    assert running.shape == "client in an engine, bucket storage"
    assert running.roots == ("/srv/kv/moon",)
    assert running.advice == ()
    assert found("python3", "offline.py", MOONCAKE_ENABLE_SSD_OFFLOAD="1").roots
    for other in (
        process("python3", "-c", "from multiprocessing.spawn import spawn_main", **environment),
        process("bash", "run.sh", name="bash", **environment),
        process("sglang::scheduler", name="sglang::schedul", **environment),
        process("python3", "offline.py", MOONCAKE_ENABLE_SSD_OFFLOAD="false"),
        process("python3", "offline.py", MOONCAKE_MASTER="127.0.0.1:50051"),
        process("python3", "offline.py"),
        process("docker", "run", "image", "mooncake_client"),
        process(),
    ):
        assert detect(other) is None


# ---------------------------------------------------------------- settings


def test_settings_have_their_names() -> None:
    known = EngineFacts("mooncake", unit_bytes=1 << 20)
    unit = mooncake.translate("unit_bytes", 1 << 22, known)
    assert unit.name is None and "--block-size" in unit.how and "--page-size" in unit.how
    depth = mooncake.translate("bytes_in_flight", 1 << 24, known)
    assert (depth.name, depth.value, depth.live) == ("MOONCAKE_OFFLOAD_USE_URING", "true", False)
    assert "32 is fixed in the source" in depth.how
    assert mooncake.translate("bytes_in_flight", 1 << 20, known).value == "false"
    ahead = mooncake.translate("prefetch_horizon", 3, known)
    assert ahead.name is None and "--promotion_on_hit" in ahead.how
    assert mooncake.translate("read_ahead", 3, known).name is None
