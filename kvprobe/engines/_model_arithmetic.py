"""The arithmetic of a prefill, from a model's ``config.json``.

Only of kinds of models that are known here, in which every layer attends to every token before it;
all others give None, as a wrong number is worse than none. Weights are those of the models' code
in Hugging Face transformers; biases and norms are left out (below 0.1 %). Of multi-head latent
attention (MLA) the keys and values are counted as written out, as engines do for a prefill; of
those restored, which some engines write out again, not. What tensor-parallel ranks repeat (KV
heads that are fewer than ranks, MLA's down-projections, routers) is counted once. Of a mixture of
experts all are counted as read: a pass of a hundred tokens and more meets nearly each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines._model_config import is_latent, keeps_all_alike, rank_bytes_per_token
from kvprobe.engines._weight_type import weight_type

_PLAIN_BYTES = 2
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class _Family:
    """What models of one ``model_type`` call their dimensions.

    ``width``: of a dense layer, which is ``gated`` (three matrices) or not (two). ``experts``: how
    many there are, None in a dense model; ``shared``: how many more all tokens pass;
    ``gated_width``: of one more such expert that has a gate before it. ``dense_first``: how many
    layers have none.
    """

    width: str = "intermediate_size"
    gated: bool = True
    experts: str | None = None
    expert_width: str = "moe_intermediate_size"
    shared: str | None = None
    gated_width: str | None = None
    dense_first: str | None = None
    latent: bool = False


_GLM = _Family(
    experts="n_routed_experts", shared="n_shared_experts", dense_first="first_k_dense_replace"
)
_DEEPSEEK = replace(_GLM, latent=True)
_FAMILIES = {
    **dict.fromkeys(("gemma", "granite", "llama", "mistral", "olmo2", "qwen2", "qwen3"), _Family()),
    "opt": _Family(width="ffn_dim", gated=False),
    "mixtral": _Family(experts="num_local_experts", expert_width="intermediate_size"),
    "qwen2_moe": _Family(experts="num_experts", gated_width="shared_expert_intermediate_size"),
    "qwen3_moe": _Family(experts="num_experts"),
    "glm4_moe": _GLM,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}


@dataclass(frozen=True)
class _Weights:
    """Of one or several layers: what a token is multiplied with, all, and all unquantised ones."""

    used: int
    kept: int
    plain: int = 0

    def __add__(self, other: _Weights) -> _Weights:
        return _Weights(self.used + other.used, self.kept + other.kept, self.plain + other.plain)

    def __mul__(self, times: int) -> _Weights:
        return _Weights(self.used * times, self.kept * times, self.plain * times)


class _UnknownError(Exception):
    """The configuration does not tell."""


def model_arithmetic(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    quantization: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    replicas: int = 1,
    tokens_per_pass: int | None = None,
) -> ModelArithmetic | None:
    """The arithmetic of one replica of a model, or None where the configuration does not tell.

    Args:
        config: the parsed ``config.json``.
        dtype: the engine's option for the model's type; None or ``auto``: the model's own.
        kv_dtype: the engine's option for the cache's type; None or ``auto``: the model's.
        quantization: the engine's option.
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: ranks that share the layers; they must divide evenly.
        replicas: data parallelism; a mixture of experts may share its experts over them.
        tokens_per_pass: the engine's bound, where it is certain.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    kept_type = weight_type(config, dtype, quantization)
    rank_bytes = rank_bytes_per_token(
        config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    if family is None or kept_type is None or rank_bytes is None:
        return None
    try:
        weights, pair, head = _products(config, family, replicas)
    except _UnknownError:
        return None
    plain_bytes = (weights.plain + head) * _PLAIN_BYTES
    return ModelArithmetic(
        linear_flops_per_token=2 * weights.used,
        attention_flops_per_pair=2 * pair,
        head_flops=2 * head,
        weight_bytes=round(weights.kept * kept_type.bytes) + plain_bytes,
        kv_bytes_per_token=rank_bytes * tensor_parallel * pipeline_parallel,
        devices=tensor_parallel * pipeline_parallel,
        item_bits=kept_type.item_bits,
        tokens_per_pass=tokens_per_pass,
        source="the model's config.json",
    )


def _products(
    model: Mapping[str, Any], family: _Family, replicas: int
) -> tuple[_Weights, int, int]:
    """Weights of all layers, products of a query and a key over all layers, weights of the head."""
    hidden, layers = _positive(model, "hidden_size"), _positive(model, "num_hidden_layers")
    if (
        model.get("text_config")
        or is_latent(model) != family.latent
        or not keeps_all_alike(model)
        or (family.experts and replicas > 1)
        or model.get("word_embed_proj_dim", hidden) != hidden
        or layers > _MOST_LAYERS
    ):
        raise _UnknownError
    attention, pair = (_latent if family.latent else _attention)(model, hidden)
    weights = attention * layers + _feed_forward(model, family, hidden, layers)
    return weights, pair * layers, hidden * _positive(model, "vocab_size")


def _attention(model: Mapping[str, Any], hidden: int) -> tuple[_Weights, int]:
    """Grouped-query attention of one layer: its weights, the products of a query and a key."""
    heads = _positive(model, "num_attention_heads")
    kv_heads = _positive(model, "num_key_value_heads", heads)
    size = _positive(model, "head_dim", hidden // heads)
    weights = hidden * size * (2 * heads + 2 * kv_heads)
    return _Weights(weights, weights), heads * 2 * size


def _latent(model: Mapping[str, Any], hidden: int) -> tuple[_Weights, int]:
    """The same of multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    heads = _positive(model, "num_attention_heads")
    latent, rope = _positive(model, "kv_lora_rank"), _positive(model, "qk_rope_head_dim")
    key = _positive(model, "qk_nope_head_dim") + rope
    value = _positive(model, "v_head_dim")
    if "q_lora_rank" not in model:
        raise _UnknownError
    weights = hidden * (latent + rope) + latent * heads * (key - rope + value)
    weights += heads * value * hidden
    if model["q_lora_rank"] is None:
        weights += hidden * heads * key
    else:
        weights += _positive(model, "q_lora_rank") * (hidden + heads * key)
    return _Weights(weights, weights), heads * (key + value)


def _feed_forward(model: Mapping[str, Any], family: _Family, hidden: int, layers: int) -> _Weights:
    """What follows the attention, of all layers."""
    sparse = sum(_is_sparse(model, family, n) for n in range(layers)) if family.experts else 0
    found = _Weights(0, 0)
    if sparse < layers:
        dense = hidden * (3 if family.gated else 2) * _positive(model, family.width)
        found += _Weights(dense, dense) * (layers - sparse)
    if sparse and family.experts:
        found += _mixture(model, family, _positive(model, family.experts), hidden) * sparse
    return found


def _mixture(model: Mapping[str, Any], family: _Family, experts: int, hidden: int) -> _Weights:
    """One layer of experts, each of three matrices, with its router and what all tokens pass."""
    sent = _positive(model, "num_experts_per_tok")
    if sent > experts:
        raise _UnknownError
    expert = 3 * hidden * _positive(model, family.expert_width)
    shared = expert * (_whole(model, family.shared, 0) if family.shared else 0)
    router = hidden * experts
    if family.gated_width:
        shared += 3 * hidden * _positive(model, family.gated_width)
        router += hidden
    return _Weights(expert * sent + shared + router, expert * experts + shared, router)


def _is_sparse(model: Mapping[str, Any], family: _Family, layer: int) -> bool:
    """Whether a layer has experts, as transformers and the engines decide it."""
    if family.dense_first:
        first = _whole(model, family.dense_first)
        return layer >= first and layer % _positive(model, "moe_layer_freq", 1) == 0
    dense = model.get("mlp_only_layers") or []
    if not isinstance(dense, list) or len(dense) > _MOST_LAYERS:
        raise _UnknownError
    return layer not in dense and (layer + 1) % _positive(model, "decoder_sparse_step", 1) == 0


def _positive(model: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = _whole(model, key, default)
    if found == 0:
        raise _UnknownError
    return found


def _whole(model: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of at least 0; the default where there is none."""
    value = model.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise _UnknownError
    return value
