"""vLLM's file-system tier: names, configuration, settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import KVPath
from kvprobe.engines import vllm
from kvprobe.model import EngineFacts

KEYS = st.text("0123456789abcdef", min_size=16, max_size=64)
BASE = "/srv/kv/org_model_0123456789ab"


@given(KEYS, st.integers(0, 1000), st.integers(0, 12))
def test_what_is_built_is_recognised(key: str, rank: int, group: int) -> None:
    path = vllm.chunk_path(BASE, key, rank, group)
    assert vllm.recognise(path) == KVPath(key)
    assert vllm.recognise(f"{path}_2163977470121185084.tmp") == KVPath(key, temporary=True)
    assert vllm.recognise(path[1:]) == KVPath(key), "also relative to the working directory"


@given(KEYS, st.integers(0, 4), st.sampled_from("0123456789abcdef"))
def test_folders_must_agree_with_the_hash(key: str, place: int, digit: str) -> None:
    path = vllm.chunk_path(BASE, key)
    at = path.index("_r0/") + 4 + place + (place >= 3)
    other = path[:at] + digit + path[at + 1 :]
    assert (vllm.recognise(other) is not None) == (digit == path[at])


@pytest.mark.parametrize(
    "path",
    [
        f"{BASE}_r0/012/34_g0/0123456789abcdef.bin.tmp",
        f"{BASE}_r0/012/34_g0/0123456789abcdef.BIN",
        f"{BASE}_r0/012/34_g0/0123456789ABCDEF.bin",
        f"{BASE}_r0/012/34_g0/01234.bin",
        f"{BASE}_r0/012/34/0123456789abcdef.bin",
        f"{BASE}/012/34_g0/0123456789abcdef.bin",
        f"{BASE}_r0/0123456789abcdef.bin",
        f"{BASE}_r0/012/34_g0/0123456789abcdef.bin/x",
        f"{BASE}_r0/012/34_g0/0123456789abcdef.bin\n",
    ],
)
def test_near_misses(path: str) -> None:
    assert vllm.recognise(path) is None


HASH = "8b177e35b852b98bd1298f7d25e45bfb"


@pytest.mark.parametrize(
    "path",
    [
        f"/srv/{HASH}/model.safetensors",
        f"/srv/{HASH}/model-00001-of-00002.safetensors",
        f"/srv/{HASH}/model.layers.0.safetensors",
        f"/srv/{HASH[1:]}/model.layers.0.self_attn.attn.safetensors",
        f"/srv/{HASH}0/model.layers.0.self_attn.attn.safetensors",
        f"/srv/{HASH}/x/model.layers.0.self_attn.attn.safetensors",
        "model.layers.0.self_attn.attn.safetensors",
        "/srv/models/model-rank-0-part-0.safetensors",
        "/srv/trace.json.rank_0",
        "/srv/stderr.log.rank_0",
        "/srv/a.out.gz.rank_1",
        "/srv/.rank_0",
        "/srv/x.rank_",
        "/srv/x.rank_0/y",
        "/srv/x.rank_0.tmp",
        "/srv/zero_pp_rank_0",
        "/srv/x.rank_0\n",
    ],
)
def test_weights_and_logs_are_not_kv_cache(path: str) -> None:
    assert vllm.recognise(path) is None


def test_digest_is_that_of_the_configuration() -> None:
    # vLLM names the folder after the first 12 digits of sha256 of this text; the digits here are
    # what sha256sum prints for it.
    fields = vllm.config_fields("org/model", 16, 4, 8, "bfloat16")
    compact = (
        '{"blocks_per_file":4,"dcp_size":1,"dtype":"bfloat16","inference_engine":"vllm",'
        '"kv_cache_groups":[{"layer_names":[],"tokens_per_block":16}],"model_name":"org/model",'
        '"pcp_size":1,"pp_size":1,"tokens_per_hash":16,"tp_size":8}'
    )
    assert json.dumps(fields, sort_keys=True, separators=(",", ":")) == compact
    assert vllm.base_path("/kv", fields) == "/kv/org_model_dbfee33b4c85"


def test_facts_come_from_the_configuration_and_one_chunk(tmp_path: Path) -> None:
    fields = vllm.config_fields("org/model", 16, 4, 8, "bfloat16")
    base = vllm.base_path(str(tmp_path), fields)
    Path(base).mkdir()
    Path(base, "config.json").write_text(json.dumps(fields))
    found = vllm.facts(str(tmp_path))
    assert found is not None
    assert (found.model, found.unit_tokens, found.unit_bytes) == ("org/model", 64, None)
    chunk = Path(vllm.chunk_path(base, "0123456789abcdef"))
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(64 * 131))
    found = vllm.facts(str(tmp_path))
    assert found is not None
    assert (found.unit_bytes, found.bytes_per_token) == (64 * 131, 131)
    assert (found.name, found.reads_in_flight, found.prefetch) == ("vllm", 1, False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_name":1}', "\0\xff", "9" * 5000])
def test_a_damaged_configuration_tells_nothing(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "m_0123456789ab"
    folder.mkdir()
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert vllm.facts(str(tmp_path)) is None
    assert vllm.facts(str(tmp_path / "missing")) is None


def test_settings() -> None:
    known = EngineFacts("vllm", unit_tokens=48, unit_bytes=48 * 2048, bytes_per_token=2048)
    larger = vllm.translate("unit_bytes", 5 * 48 * 2048 + 7, known)
    assert (larger.name, larger.value, larger.live) == ("block_size", "240", False)
    smaller = vllm.translate("unit_bytes", 100, known)
    assert smaller.value == "48", "never below the unit that is a multiple of the GPU block"
    by_token = vllm.translate("unit_bytes", 1000 * 2048, EngineFacts("vllm", bytes_per_token=2048))
    assert by_token.value == str(1000 // 16 * 16)
    assert vllm.translate("unit_bytes", 1 << 20, EngineFacts("vllm")).value is None
    for knob in ("bytes_in_flight", "prefetch_horizon", "something_else"):
        setting = vllm.translate(knob, 1 << 20, known)
        assert (setting.name, setting.value) == (None, None)
        assert setting.how
