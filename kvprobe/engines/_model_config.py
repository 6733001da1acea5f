"""Bytes of KV cache a token, from a model's ``config.json``.

``2 x layers x KV heads x head size x type's bytes`` for multi-head and grouped-query attention,
``layers x (latent + rope) x type's bytes`` for multi-head latent attention (MLA), whose cache is
not divided by tensor parallelism. Models of which that is not the whole truth (recurrent
layers, an index beside the cache, heads that differ by layer) give None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CONFIG_BYTES = 1 << 20
_TYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Formats that keep scales beside the values are left out on purpose."""

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_NOT_PLAIN = (
    "attn_layer_period",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_head_dim",
    "index_topk",
    "layers_block_type",
    "linear_num_value_heads",
    "mamba_d_state",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "ssm_cfg",
    "state_size",
)


def read_config(
    model: str, environment: Mapping[str, str] | None = None, folder: str | None = None
) -> dict[str, Any] | None:
    """``config.json`` of a model as a process would find it, or None.

    Args:
        model: a folder, or the name of a model in the Hugging Face cache.
        environment: of the process: where its cache is.
        folder: its working directory.
    """
    place = Path(folder or "/", model)
    found = _read(place / "config.json")
    if found is not None or model.startswith(("/", ".")):
        return found
    return _read_cached(model, environment or {})


def rank_bytes_per_token(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int | None:
    """Bytes that one rank keeps of one token, or None where the configuration does not tell.

    Args:
        config: the parsed ``config.json``.
        dtype: the engine's option for the model's type; None or ``auto``: the model's own.
        kv_dtype: the engine's option for the cache's type; None or ``auto``: the model's.
        tensor_parallel: ranks that share the KV heads; more than there are keep copies.
        pipeline_parallel: ranks that share the layers; they must divide evenly.
    """
    text = config.get("text_config")
    model = {**config, **text} if isinstance(text, dict) else dict(config)
    kinds = model.get("layer_types")
    layers = _count(model, "num_hidden_layers")
    item = _item_bytes(model, dtype, kv_dtype)
    if (
        any(model.get(key) for key in _NOT_PLAIN)
        or (isinstance(kinds, list) and not all(kind in _ATTENTION for kind in kinds))
        or layers is None
        or item is None
        or min(tensor_parallel, pipeline_parallel) < 1
        or layers % pipeline_parallel
    ):
        return None
    values = _values_a_layer(model, tensor_parallel)
    return None if values is None else layers // pipeline_parallel * values * item


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether every tensor-parallel rank keeps the same whole cache (MLA)."""
    text = config.get("text_config")
    return bool((text if isinstance(text, dict) else config).get("kv_lora_rank"))


def keeps_all_alike(config: Mapping[str, Any]) -> bool:
    """Whether every layer keeps every token, so that engines do not store layers in groups."""
    text = config.get("text_config")
    model = {**config, **text} if isinstance(text, dict) else config
    kinds = model.get("layer_types")
    if isinstance(kinds, list):
        return all(kind == "full_attention" for kind in kinds)
    return not model.get("sliding_window") or model.get("use_sliding_window") is False


def _values_a_layer(model: Mapping[str, Any], tensor_parallel: int) -> int | None:
    if model.get("kv_lora_rank"):
        latent, rope = _count(model, "kv_lora_rank"), _count(model, "qk_rope_head_dim")
        return None if latent is None or rope is None else latent + rope
    heads, hidden = _count(model, "num_attention_heads"), _count(model, "hidden_size")
    kv_heads = _count(model, "num_key_value_heads") or heads
    size = _count(model, "head_dim")
    if size is None and heads and hidden:
        size = hidden // heads
    if kv_heads is None or size is None:
        return None
    return max(kv_heads // tensor_parallel, 1) * (size + (_count(model, "v_head_dim") or size))


def _item_bytes(model: Mapping[str, Any], dtype: str | None, kv_dtype: str | None) -> int | None:
    if kv_dtype not in (None, "auto"):
        return _TYPE_BYTES.get(str(kv_dtype))
    quantized = model.get("quantization_config")
    if isinstance(quantized, dict) and (
        quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo")
    ):
        return None  # what "auto" makes of it depends on the engine's version
    if dtype not in (None, "auto"):
        return _TYPE_BYTES.get(str(dtype))
    own = model.get("dtype") or model.get("torch_dtype")
    if own in ("float32", "float"):
        return 2  # vLLM and SGLang serve such models in a type of two bytes
    return _TYPE_BYTES.get(own) if isinstance(own, str) else None


def _count(model: Mapping[str, Any], key: str) -> int | None:
    value = model.get(key)
    return value if type(value) is int and 0 < value < 1 << 32 else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            found = json.loads(file.read(_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_cached(model: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if not hub:
        cache = environment.get("XDG_CACHE_HOME") or environment.get("HOME", "") + "/.cache"
        hub = (environment.get("HF_HOME") or cache + "/huggingface") + "/hub"
    found = sorted(Path(hub, "models--" + model.replace("/", "--")).glob("snapshots/*/config.json"))
    # Revisions of one model differ in weights, not in shape.
    return _read(found[0]) if found else None
