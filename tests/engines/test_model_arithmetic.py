"""The arithmetic of a prefill: published sizes, and a model whose products are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines._model_arithmetic import model_arithmetic
from tests.engines.counted_model import CountedModel

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def known(config: dict[str, Any], **options: Any) -> ModelArithmetic:
    found = model_arithmetic(config, **options)
    assert found is not None
    return found


LLAMA = config_of("llama-3.1-8b")
# Numbers of tensors' elements that are no product's: norms, of OPT biases and positions too.
EXACT = {
    "llama-3.1-8b": (8_030_261_248, 65 * 4096),
    "llama-3-70b": (70_553_706_496, 161 * 8192),
    "qwen3-32b": (32_762_123_264, 129 * 5120 + 64 * 2 * 128),
    "mixtral-8x7b": (46_702_792_704, 65 * 4096),
    "qwen3-30b-a3b": (30_532_122_624, 97 * 2048 + 48 * 2 * 128),
    "opt-125m": (125_239_296, 2050 * 768 + 12 * (8 * 768 + 3072 + 768) + 2 * 768),
}
# Model cards and technical reports: in all, active; the latter without the embedding where True.
ROUGH = {
    "mixtral-8x7b": (46.7e9, 12.9e9, False),
    "qwen3-30b-a3b": (30.5e9, 3.3e9, False),
    "qwen1.5-moe-a2.7b": (14.3e9, 2.7e9, False),
    "deepseek-v3": (671e9, 36.6e9, True),
    "deepseek-v2-lite": (15.7e9, 2.4e9, True),
    "glm-4.5-air": (106e9, 12e9, True),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_weights_are_all_those_of_the_model(name: str) -> None:
    config, (total, others) = config_of(name), EXACT[name]
    found = known(config)
    embedding = config["hidden_size"] * config["vocab_size"]
    tied = config["model_type"] == "opt"  # the head is the embedding
    assert found.weight_bytes / 2 + (0 if tied else embedding) + others == total
    assert found.head_flops == 2 * embedding
    if "num_experts_per_tok" not in config:
        assert found.linear_flops_per_token + found.head_flops == found.weight_bytes


@pytest.mark.parametrize("name", ROUGH)
def test_a_mixture_multiplies_its_active_weights(name: str) -> None:
    config, (total, active, without) = config_of(name), ROUGH[name]
    found = known({**config, "quantization_config": None})
    embedding = config["hidden_size"] * config["vocab_size"]
    used = (found.linear_flops_per_token + found.head_flops) / 2 + (0 if without else embedding)
    # GLM's card rounds 12.8 to 12 billion.
    assert used == pytest.approx(active, rel=0.07 if name == "glm-4.5-air" else 0.03)
    assert found.weight_bytes / 2 + embedding == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize(
    ("name", "pair", "cache"),
    [
        ("llama-3.1-8b", 2 * 32 * 32 * (128 + 128), 131_072),
        ("qwen3-30b-a3b", 2 * 48 * 32 * (128 + 128), 98_304),
        ("opt-125m", 2 * 12 * 12 * (64 + 64), 36_864),
        ("deepseek-v3", 2 * 61 * 128 * (192 + 128), 70_272),
    ],
)
def test_a_pair_and_the_cache(name: str, pair: int, cache: int) -> None:
    found = known(config_of(name))
    assert (found.attention_flops_per_pair, found.kv_bytes_per_token) == (pair, cache)


TOY = {
    "hidden_size": 17,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "vocab_size": 31,
    "intermediate_size": 29,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 11}
LATENT = {
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 3,
    "v_head_dim": 13,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
TOYS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "not gated": {"model_type": "opt", "ffn_dim": 29, "intermediate_size": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 7, "num_experts_per_tok": 2},
    "experts": {"model_type": "qwen3_moe", "num_experts": 7, **EXPERTS},
    "gated expert": {
        "model_type": "qwen2_moe",
        "num_experts": 7,
        "shared_expert_intermediate_size": 23,
        **EXPERTS,
    },
    "shared": {
        "model_type": "glm4_moe",
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        **EXPERTS,
    },
    "latent": {"model_type": "deepseek_v3", "q_lora_rank": 19, **LATENT},
    "latent without queries": {"model_type": "deepseek_v2", "q_lora_rank": None, **LATENT},
}


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("context", "new"), [(0, 1), (0, 23), (19, 13), (37, 1)])
def test_operations_are_those_that_a_model_does(name: str, context: int, new: int) -> None:
    config = {**TOY, **TOYS[name]}
    model, found = CountedModel(config), known(config)
    inputs = np.random.default_rng(3).normal(size=(context + new, 17))
    if context:
        model.prefill(inputs[:context])
    model.operations = 0
    assert model.prefill(inputs[context:]).shape == (1, 31)
    assert model.operations == found.prefill_flops(new, context)


@pytest.mark.parametrize("name", TOYS)
def test_the_counted_model_is_causal_and_has_those_weights(name: str) -> None:
    config = {**TOY, **TOYS[name]}
    inputs = np.random.default_rng(5).normal(size=(211, 17))
    whole, parts = CountedModel(config), CountedModel(config)
    logits = whole.prefill(inputs)
    parts.prefill(inputs[:100])
    assert parts.prefill(inputs[100:]) == pytest.approx(logits)
    assert known(config).weight_bytes == 2 * whole.weights


def test_bytes_of_passes() -> None:
    """A pass reads the weights and what is before it; counted one by one."""
    found = known(LLAMA, tokens_per_pass=2048)
    new, context = 5003, 701
    moved, done = 0, 0
    while done < new:
        part = min(2048, new - done)
        moved += found.weight_bytes + found.kv_bytes_per_token * (context + done + part)
        done += part
    assert found.prefill_bytes(new, context) == moved


def quantised(name: str, scheme: dict[str, Any], **options: Any) -> ModelArithmetic | None:
    return model_arithmetic({**config_of(name), "quantization_config": scheme}, **options)


W8 = {"num_bits": 8, "type": "float"}
W4 = {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}


def compressed(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


LINEAR = known(LLAMA).linear_flops_per_token // 2
HEAD = 4096 * 128256


@pytest.mark.parametrize(
    ("scheme", "bits", "item_bytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 1),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.gate"]}, 8, 1),
        (compressed(W8, W8), 8, 1),
        (compressed(W4, format="pack-quantized"), 16, 0.5 + 2 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 16, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 16, 1),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.down_proj"]}, None, 0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": 1}}, None, 0),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, None, 0),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, None, 0),
        ({"quant_method": "bitsandbytes"}, None, 0),
        ({"quant_method": "mxfp4"}, None, 0),
        ({"quant_method": 7}, None, 0),
        ("fp8", None, 0),
        (compressed(W4), None, 0),
        (compressed(W8, W4), None, 0),
        (compressed(W8, W8, ignore=["model.layers.7.self_attn.q_proj"]), None, 0),
        (compressed(None, W8), None, 0),
        (compressed(W8, W8) | {"config_groups": {"a": {}, "b": {}}}, None, 0),
    ],
)
def test_quantised_weights(scheme: Any, bits: int | None, item_bytes: float) -> None:
    found = quantised("llama-3.1-8b", scheme)
    if bits is None:
        assert found is None
        return
    assert found is not None
    assert found.item_bits == bits
    assert found.weight_bytes == round(LINEAR * item_bytes) + 2 * HEAD
    assert found.linear_flops_per_token == 2 * LINEAR


def test_deepseek_is_kept_in_fp8_but_for_routers_and_head() -> None:
    found = known(config_of("deepseek-v3"))
    plain = 58 * 7168 * 256 + 7168 * 129280
    whole = known({**config_of("deepseek-v3"), "quantization_config": None}).weight_bytes // 2
    assert (found.item_bits, found.weight_bytes) == (8, whole + plain)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"quantization": "fp8"}, 8),
        ({"quantization": "bitsandbytes"}, None),
        ({"dtype": "float16"}, 16),
        ({"dtype": "auto"}, 16),
        ({"dtype": "float32"}, None),
        ({"kv_dtype": "nvfp4"}, None),
    ],
)
def test_options_decide(options: dict[str, Any], bits: int | None) -> None:
    found = model_arithmetic(LLAMA, **options)
    assert (None if found is None else found.item_bits) == bits


def test_an_option_that_is_not_the_checkpoints_is_unknown() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert quantised("llama-3.1-8b", awq, quantization="awq_marlin") is not None
    assert quantised("llama-3.1-8b", awq, quantization="fp8") is None


def test_ranks_share_the_work_and_each_keeps_its_cache() -> None:
    one, many = known(LLAMA), known(LLAMA, tensor_parallel=4, pipeline_parallel=2)
    assert (one.devices, many.devices) == (1, 8)
    assert one.linear_flops_per_token == many.linear_flops_per_token
    assert one.kv_bytes_per_token == many.kv_bytes_per_token
    assert known(LLAMA, tensor_parallel=16).kv_bytes_per_token == 2 * one.kv_bytes_per_token
    latent = config_of("deepseek-v3")
    assert known(latent, tensor_parallel=8).kv_bytes_per_token == 8 * 70_272
    assert known(LLAMA, replicas=2).devices == 1
    assert model_arithmetic(latent, replicas=2) is None, "replicas may share the experts"
    assert model_arithmetic(LLAMA, pipeline_parallel=3) is None


MIXTURE = config_of("qwen3-30b-a3b")


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": "gpt_oss"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"sliding_window": 4096, "use_sliding_window": None},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"full_attention_interval": 4},
        {"index_topk": 2048},
        {"text_config": {"hidden_size": 4096}},
        {"num_experts_per_tok": 129},
        {"num_experts_per_tok": None},
        {"num_experts": 0},
        {"num_experts": True},
        {"moe_intermediate_size": -768},
        {"mlp_only_layers": 3},
        {"mlp_only_layers": [0] * 5000},
        {"decoder_sparse_step": 0},
        {"hidden_size": 2048.0},
        {"vocab_size": "151936"},
        {"num_hidden_layers": 1 << 31},
        {"torch_dtype": None},
    ],
)
def test_what_is_not_certain_is_unknown(odd: dict[str, Any]) -> None:
    assert model_arithmetic(MIXTURE) is not None
    assert model_arithmetic({**MIXTURE, **odd}) is None


def test_layers_without_experts() -> None:
    expert, dense = 3 * 2048 * 768, 3 * 2048 * 6144
    each = 8 * expert + 2048 * 128
    whole = known(MIXTURE).linear_flops_per_token

    def less(layers: int) -> int:
        return whole - 2 * layers * (each - dense)

    assert known({**MIXTURE, "mlp_only_layers": [0, 7, 47, 900]}).linear_flops_per_token == less(3)
    assert known({**MIXTURE, "decoder_sparse_step": 2}).linear_flops_per_token == less(24)


def test_queries_of_a_latent_model_must_be_told() -> None:
    config = config_of("deepseek-v3")
    del config["q_lora_rank"]
    assert model_arithmetic(config) is None
    lite = config_of("opt-125m")
    assert model_arithmetic({**lite, "word_embed_proj_dim": 512}) is None
