"""Bytes a token, against the table of reference figures."""

from __future__ import annotations

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.workload.chunks import check_alignment
from kvprobe.workload.shapes import PRESETS, preset

# Written out from the models' published dimensions, not from the code: 2 x layers x heads x dim
# x 2 B, and for MLA layers x (512 + 64) x 2 B.
REFERENCE = {
    "tiny": (2_048, 2_048),
    "llama-3.1-8b": (131_072, 131_072),
    "llama-3-70b": (327_680, 327_680),
    "qwen3-32b": (262_144, 262_144),
    "deepseek-v3": (70_272, 70_272),
    "moe-480b-tp8": (31_744, 253_952),
}


def test_every_preset_has_a_reference_figure() -> None:
    assert set(PRESETS) == set(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_bytes_a_token(name: str) -> None:
    shape = PRESETS[name]
    assert (shape.rank_bytes_per_token, shape.stored_bytes_per_token) == REFERENCE[name]
    assert shape.source


def test_tensor_parallel_divides_heads_but_never_a_latent() -> None:
    assert preset("llama-3.1-8b", tp=4).rank_bytes_per_token == 131_072 // 4
    assert preset("llama-3.1-8b", tp=4).stored_bytes_per_token == 131_072
    assert preset("llama-3.1-8b", tp=16).rank_bytes_per_token == 131_072 // 8
    assert preset("llama-3.1-8b", tp=16).stored_bytes_per_token == 2 * 131_072, "replicated heads"
    assert preset("deepseek-v3", tp=8).rank_bytes_per_token == 70_272
    assert preset("deepseek-v3", tp=8).stored_bytes_per_token == 70_272


def test_dtype_and_custom_shapes() -> None:
    assert preset("llama-3.1-8b", dtype="fp8").rank_bytes_per_token == 65_536
    custom = preset("custom", layers=3, kv_heads=5, head_dim=7, dtype="fp32")
    assert custom.rank_bytes_per_token == 2 * 3 * 5 * 7 * 4
    latent = preset("custom", layers=3, kv_lora_rank=11, rope_dim=13)
    assert latent.rank_bytes_per_token == 3 * 24 * 2
    names = {custom.name, latent.name, preset("tiny").name, preset("tiny", layers=5).name}
    assert len(names) == 4, "different dimensions must not share a folder"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-2", {}),
        ("custom", {}),
        ("custom", {"layers": 3}),
        ("custom", {"layers": 3, "kv_lora_rank": 5}),
        ("tiny", {"dtype": "int3"}),
    ],
)
def test_refused_shapes(name: str, changes: dict[str, int | str]) -> None:
    with pytest.raises(KvprobeError) as caught:
        preset(name, **changes)
    assert caught.value.hint


def test_direct_alignment_is_explained() -> None:
    with pytest.raises(KvprobeError, match="1124352 B is not a multiple of 4096") as caught:
        check_alignment(16, 70_272)
    assert "--unit-tokens 32" in caught.value.hint
    check_alignment(32, 70_272)
    check_alignment(64, 70_272)
    with pytest.raises(KvprobeError) as caught:
        check_alignment(1, 4099)
    assert "--unit-tokens 4096" in caught.value.hint


# Published: parameters in all, and active ones of a mixture of experts (model cards; DeepSeek-V3
# counts 36.6 B without the embedding). Those of the dense models are the sums of their tensors.
PARAMETERS = {
    "llama-3.1-8b": (8_030_261_248, None, 4096, 65 * 4096),
    "llama-3-70b": (70_553_706_496, None, 8192, 161 * 8192),
    "qwen3-32b": (32_762_123_264, None, 5120, 129 * 5120 + 64 * 2 * 128),
    "deepseek-v3": (671e9, 36.6e9, 7168, 0),
    "moe-480b-tp8": (480e9, 35e9, 6144, 0),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_arithmetic_has_the_weights_that_are_published(name: str) -> None:
    shape, (total, active, hidden, norms) = PRESETS[name], PARAMETERS[name]
    found = shape.arithmetic
    assert found is not None and found.source == shape.source
    embedding = hidden * shape.config["vocab_size"]
    used = found.linear_flops_per_token // 2 + found.head_flops // 2
    if active is None:
        assert used + embedding + norms == total
        assert found.weight_bytes == 2 * used
    else:
        assert used == pytest.approx(active, rel=0.02)
        item = 1 if name == "deepseek-v3" else 2
        assert found.weight_bytes / item + embedding == pytest.approx(total, rel=0.005)
    assert found.item_bits == (8 if name == "deepseek-v3" else 16)


@pytest.mark.parametrize("name", REFERENCE)
def test_the_arithmetic_has_the_shape_s_cache_and_ranks(name: str) -> None:
    shape = preset(name, tp=16, dtype="fp8", layers=7)
    found = shape.arithmetic
    assert found is not None and found.devices == 16
    assert found.kv_bytes_per_token == shape.rank_bytes_per_token * 16
    whole = PRESETS[name].arithmetic
    assert whole is not None
    per_layer = whole.attention_flops_per_pair / PRESETS[name].layers
    assert found.attention_flops_per_pair == 7 * per_layer


def test_of_a_custom_shape_only_the_cache_is_known() -> None:
    assert preset("custom", layers=3, kv_heads=5, head_dim=7).arithmetic is None
