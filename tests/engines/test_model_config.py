"""Bytes a token against the published table of models, and against real files of a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe.engines._model_config import is_latent, rank_bytes_per_token, read_config


def gqa(layers: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """A configuration with grouped-query attention in bfloat16."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "hidden_size": 64 * head_dim,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }


DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
# The model of the recorded vLLM run: 262,144 B a file of 128 tokens.
LLAMA_TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gqa(32, 8, 128), 131_072),  # Mistral-7B: a cache server logged 32 MiB for 256 tokens
        (gqa(80, 8, 128), 327_680),  # Llama-3.x-70B
        (gqa(64, 8, 128), 262_144),  # Qwen3-32B
        (gqa(48, 4, 128), 98_304),  # Qwen3-30B-A3B
        (gqa(36, 8, 64), 73_728),  # gpt-oss-120b
        (DEEPSEEK, 70_272),
        (LLAMA_TINY, 2_048),
    ],
)
def test_known_models(config: dict[str, Any], expected: int) -> None:
    assert rank_bytes_per_token(config) == expected
    assert rank_bytes_per_token({"model_type": "x", "text_config": config}) == expected


def test_the_real_file_size_follows() -> None:
    assert 128 * (rank_bytes_per_token(LLAMA_TINY) or 0) == 262_144


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expected"),
    [(2, 1, 65_536), (8, 1, 16_384), (16, 1, 16_384), (1, 4, 32_768), (4, 2, 16_384), (1, 3, None)],
)
def test_ranks_share_heads_and_layers(tensor: int, pipeline: int, expected: int | None) -> None:
    found = rank_bytes_per_token(
        gqa(32, 8, 128), tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    assert found == expected


def test_a_latent_cache_is_not_divided() -> None:
    assert rank_bytes_per_token(DEEPSEEK, tensor_parallel=8) == 70_272
    assert is_latent(DEEPSEEK) and is_latent({"text_config": DEEPSEEK})
    assert not is_latent(LLAMA_TINY)


@pytest.mark.parametrize(
    ("own", "dtype", "kv_dtype", "expected"),
    [
        ({}, None, None, 131_072),
        ({}, "auto", "auto", 131_072),
        ({}, None, "fp8", 65_536),
        ({}, "float32", None, 262_144),
        ({}, "float32", "fp8_e4m3", 65_536),
        ({"torch_dtype": "float32"}, "auto", None, 131_072),
        ({"torch_dtype": None, "dtype": "float16"}, None, None, 131_072),
        ({"torch_dtype": None}, None, None, None),
        ({"torch_dtype": "int3"}, None, None, None),
        ({}, None, "fp8_ds_mla", None),
        ({}, None, "nvfp4", None),
        ({"quantization_config": {"quant_method": "fp8"}}, None, None, 131_072),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, None, None, None),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, None, "bfloat16", 131_072),
    ],
)
def test_types(
    own: dict[str, Any], dtype: str | None, kv_dtype: str | None, expected: int | None
) -> None:
    config = gqa(32, 8, 128, **own)
    assert rank_bytes_per_token(config, dtype=dtype, kv_dtype=kv_dtype) == expected


def test_values_may_be_narrower_than_keys() -> None:
    config = gqa(10, 4, 192, v_head_dim=128)
    assert rank_bytes_per_token(config) == 10 * 4 * (192 + 128) * 2


@pytest.mark.parametrize(
    "odd",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": [7]},
        {"full_attention_interval": 4},
        {"index_topk": 2048},
        {"num_kv_shared_layers": 15},
        {"num_hidden_layers": None},
        {"num_hidden_layers": "32"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": True},
        {"kv_lora_rank": 512},
        {"head_dim": None, "hidden_size": None},
    ],
)
def test_what_is_not_certain_is_unknown(odd: dict[str, Any]) -> None:
    assert rank_bytes_per_token(gqa(32, 8, 128) | odd) is None


def test_sliding_layers_count_and_a_null_is_absent() -> None:
    kinds = ["sliding_attention", "full_attention"] * 18
    config = gqa(36, 8, 64) | {"layer_types": kinds, "num_kv_shared_layers": 0, "head_dim": None}
    assert rank_bytes_per_token(config) == 73_728


def test_a_model_is_found_where_its_process_finds_it(tmp_path: Path) -> None:
    def put(place: Path, layers: int) -> None:
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))

    put(tmp_path / "models" / "tiny", 3)
    put(tmp_path / "home/.cache/huggingface/hub/models--org--name/snapshots/0a1b", 5)
    put(tmp_path / "hf/hub/models--org--name/snapshots/0a1b", 7)
    put(tmp_path / "hub/models--org--name/snapshots/0a1b", 11)
    home = {"HOME": str(tmp_path / "home")}

    def layers(
        model: str, environment: dict[str, str] | None = None, folder: str | None = None
    ) -> int | None:
        found = read_config(model, environment, folder)
        return None if found is None else found["num_hidden_layers"]

    assert layers(str(tmp_path / "models/tiny")) == 3
    assert layers("models/tiny", folder=str(tmp_path)) == 3
    assert layers("./models/tiny", home, str(tmp_path)) == 3
    assert layers("org/name", home) == 5
    assert layers("org/name", home | {"HF_HOME": str(tmp_path / "hf")}) == 7
    assert layers("org/name", home | {"HF_HUB_CACHE": str(tmp_path / "hub")}) == 11
    assert layers("org/other", home) is None
    assert layers("org/name") is None
    assert layers("/org/name", home) is None
    assert layers("bad\0name", home) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "1", '"x"', "[" * 100_000, "\xff"])
def test_a_damaged_configuration_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert read_config(str(tmp_path)) is None
