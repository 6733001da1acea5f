"""llm-d's and KVBM's files and settings; both speak through an engine of another project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe.adapter import KVPath, Process, RunningEngine, SignalPlace
from kvprobe.engines import engines, kvbm, llmd, vllm
from kvprobe.model import EngineFacts

# ---------------------------------------------------------------- llm-d


def llmd_server(model: str = "org/none", *options: str, **extra: Any) -> Process:
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "SharedStorageOffloadingSpec",
            "spec_module_path": "llmd_fs_backend.spec",
            **extra,
        },
    }
    arguments = ("vllm", "serve", model, "--kv-transfer-config", json.dumps(config), *options)
    return Process(17, 1, "vllm", arguments, {}, "/srv")


def test_llmd_tells_of_files_and_vllm_of_requests() -> None:
    files, requests = llmd.detect(llmd_server()), vllm.detect(llmd_server())
    assert files is not None and requests is not None
    assert files.roots == ("/tmp/shared-kv",) and requests.roots == ()
    assert not files.signals and not files.advice and requests.signals and requests.advice
    assert requests.shape == "none, OffloadingConnector with llm-d's files"
    assert files.shape == "256 tokens a file, 64 threads a GPU"


def test_llmd_sizes_are_those_of_a_rank(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = {**shape, "hidden_size": 256, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"shared_storage_path": "kv", "block_size": 512, "threads_per_gpu": 7}
    engine = llmd.detect(llmd_server(str(tmp_path), "-tp", "2", **said))
    assert engine is not None
    assert engine.facts == EngineFacts(
        "llmd",
        model=str(tmp_path),
        unit_tokens=512,
        unit_bytes=512 * 1024,
        bytes_per_token=2048,
        reads_in_flight=7,
        direct=False,
        root="/srv/kv",
        prefetch=False,
    )
    for knob, value, name, expected in (
        ("unit_bytes", 3 * 512 * 1024, "block_size", "1536"),
        ("unit_bytes", 1, "block_size", "512"),
        ("bytes_in_flight", 13 * 512 * 1024, "threads_per_gpu", "13"),
        ("bytes_in_flight", 1, "threads_per_gpu", "1"),
        ("prefetch_horizon", 1, None, None),
        ("other", 1, None, None),
    ):
        setting = llmd.translate(knob, value, engine.facts)
        assert (setting.name, setting.value) == (name, expected)
        assert setting.how
    unknown = llmd.translate("bytes_in_flight", 1, EngineFacts("llmd"))
    assert (unknown.name, unknown.value) == ("threads_per_gpu", None)


@pytest.mark.parametrize("extra", [{"backend": "OBJ"}, {"spec_module_path": "other.spec"}])
def test_other_backends_are_not_llmds_files(extra: dict[str, str]) -> None:
    assert llmd.detect(llmd_server(**extra)) is None


def test_a_plain_server_is_not_llmd() -> None:
    assert llmd.detect(Process(17, 1, "vllm", ("vllm", "serve", "m"), {})) is None
    assert llmd.detect(Process(17, 1, "cat", ("cat",), {})) is None


BASE = "/kv/m/block_size_16_blocks_per_file_16/tp_1_pp_size_1_pcp_size_1/rank_0/bfloat16"


def test_llmd_claims_only_its_former_layout() -> None:
    chunk = "0a1/b2/0a1b2c3d4e5f6071.bin"
    assert llmd.recognise(f"{BASE}/{chunk}") == KVPath("0a1b2c3d4e5f6071")
    assert llmd.recognise(f"{BASE}/{chunk}"[1:]) is not None, "relative to a working directory"
    for near in (
        f"{BASE}/0a1/b3/0a1b2c3d4e5f6071.bin",
        f"{BASE}/0a1/b2/0a1b2c3d4e.bin",
        f"{BASE}/0a1/b2/0a1b2c3d4e5f6071.bin/x",
        f"{BASE}/x/{chunk}",
        f"{BASE.replace('rank_0', 'rank_')}/{chunk}",
        f"{BASE.replace('_pcp_size_1', '')}/{chunk}",
        "/kv/org_model_0123456789ab_r0/012/34_g0/0123456789abcdef.bin",
    ):
        assert llmd.recognise(near) is None, near


# ---------------------------------------------------------------- KVBM


def dynamo(*arguments: str, name: str = "python3", **environment: str) -> RunningEngine | None:
    return kvbm.detect(Process(19, 1, name, arguments, environment, "/srv"))


VLLM = ("python3", "-m", "dynamo.vllm", "--model", "m", "--connector", "kvbm")


def test_a_disk_tier_is_found_by_its_environment() -> None:
    engine = dynamo(*VLLM, DYN_KVBM_DISK_CACHE_GB="64")
    assert engine is not None
    assert (engine.engine, engine.pid, engine.roots) == ("kvbm", 19, ("/tmp",))
    assert engine.signals == () and "DYN_KVBM_METRICS=true" in engine.advice[0]
    assert engine.facts == EngineFacts("kvbm", direct=True, root="/tmp", prefetch=False)
    other = dynamo(
        *VLLM,
        DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS="4096",
        DYN_KVBM_DISK_CACHE_DIR="kv/disk/",
        DYN_KVBM_METRICS="true",
        DYN_KVBM_METRICS_PORT="6881",
        DYN_KVBM_DISK_DISABLE_O_DIRECT="1",
    )
    assert other is not None and other.roots == ("/srv/kv/disk",) and other.advice == ()
    assert other.signals == (SignalPlace("metrics", "http://127.0.0.1:6881/metrics"),)
    assert other.facts is not None and other.facts.direct is False
    assert vllm.detect(Process(19, 1, "python3", VLLM, {})) is not None, "which tells of requests"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (VLLM, {}),
        (VLLM, {"DYN_KVBM_DISK_CACHE_GB": "0"}),
        (VLLM, {"DYN_KVBM_DISK_CACHE_GB": ""}),
        (VLLM, {"DYN_KVBM_CPU_CACHE_GB": "20"}),
        (("python3", "-m", "dynamo.frontend"), {"DYN_KVBM_DISK_CACHE_GB": "64"}),
        (("bash", "-c", "kvbm"), {"DYN_KVBM_DISK_CACHE_GB": "64"}),
        ((), {"DYN_KVBM_DISK_CACHE_GB": "64"}),
    ],
)
def test_without_a_disk_tier_there_is_nothing(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert dynamo(*arguments, **environment) is None


def test_kvbm_under_plain_vllm_and_its_children() -> None:
    config = '{"kv_connector":"DynamoConnector","kv_connector_module_path":"kvbm.vllm_integration"}'
    words = ("/srv/bin/python3", "/srv/bin/vllm", "serve", "m", "--kv-transfer-config", config)
    assert dynamo(*words, DYN_KVBM_DISK_CACHE_GB="64") is not None
    assert dynamo(*words, name="VLLM::Worker", DYN_KVBM_DISK_CACHE_GB="64") is None


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/dynamo-kvbm-disk-cache-aB3dE",
        "/tmp/dynamo-kvbm-disk-cache-aB3dE99",
        "/tmp/dynamo-kvbm-disk-cache-aB3dE9 (deleted) ",
        "/tmp/dynamo-kvbm-disk-cache-aB3dE9/x",
        "/tmp/xdynamo-kvbm-disk-cache-aB3dE9",
        "/tmp/dynamo-kvbm-disk-cache-aB3dE9\n",
    ],
)
def test_near_misses_of_the_disk_tiers_file(path: str) -> None:
    assert kvbm.recognise(path) is None


def test_kvbm_settings() -> None:
    known = EngineFacts("kvbm", unit_bytes=1 << 20)
    setting = kvbm.translate("bytes_in_flight", 52 << 20, known)
    assert (setting.name, setting.value) == ("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", "13")
    assert kvbm.translate("bytes_in_flight", 1, known).value == "1"
    assert kvbm.translate("bytes_in_flight", 1, EngineFacts("kvbm")).value is None
    for knob in ("unit_bytes", "prefetch_horizon", "other"):
        setting = kvbm.translate(knob, 1, known)
        assert (setting.name, setting.value) == (None, None) and setting.how


def test_kvbm_log_and_metrics() -> None:
    engine = engines()["kvbm"]
    (line,) = engine.log_lines
    text = "INFO block_manager: DiskStorage created: fd=31, file=/srv/kv/dynamo-kvbm-disk-cache-"
    text += "aB3dE9, size=68719476736 bytes"
    match = line.pattern.search(text)
    assert line.mark in text and match is not None
    assert line.read(match, None) == EngineFacts("kvbm", root="/srv/kv")
    assert engine.metrics is not None
    kept = engine.metrics.keep.match
    assert kept("kvbm_onboard_blocks_d2d") and kept("kvbm_matched_tokens_total")
    assert not kept("kvbm_matched_tokens_created") and not kept("dynamo_component_active_blocks")
