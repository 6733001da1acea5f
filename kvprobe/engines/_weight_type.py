"""The type of a model's weights, from its ``config.json`` and the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HALF = ("bfloat16", "float16", "half")
_SPARED = ("lm_head", "gate", "norm")
"""What every format leaves as it is; it is counted as such."""
_SCALE_BYTES = 2


@dataclass(frozen=True)
class WeightType:
    """Bytes of a weight in the linear layers, and bits of the numbers that are multiplied there.

    Scales of groups are in ``bytes``; those of rows or blocks of 8-bit types are below 0.1 %.
    """

    bytes: float
    item_bits: int


def weight_type(
    config: Mapping[str, Any], dtype: str | None = None, option: str | None = None
) -> WeightType | None:
    """The type of the linear layers, or None where it is not certain.

    Args:
        config: the parsed ``config.json``.
        dtype: the engine's option for the model's type; None or ``auto``: the model's own.
        option: the engine's option for quantisation.
    """
    own = config.get("dtype") or config.get("torch_dtype")
    # Engines serve models of float32 in a type of two bytes.
    half = (*_HALF, "float32") if dtype in (None, "auto") else _HALF
    if (own if dtype in (None, "auto") else dtype) not in half:
        return None
    quantized = config.get("quantization_config") or config.get("compression_config")
    if not quantized:
        # vLLM and SGLang make fp8 of such a model as they load it.
        return {None: WeightType(2, 16), "fp8": WeightType(1, 8)}.get(option)
    if not isinstance(quantized, dict):
        return None
    method = quantized.get("quant_method")
    spared = quantized.get("modules_to_not_convert") or quantized.get("ignored_layers") or []
    if (
        not isinstance(method, str)
        or not (option or method).startswith(method)
        or not _are_spared(spared)
    ):
        return None
    if method == "fp8":
        return WeightType(1, 8)
    if method in ("awq", "gptq") and not quantized.get("dynamic"):
        return _weight_only(quantized.get("bits"), quantized.get("group_size"), zeros=True)
    return _compressed(quantized) if method == "compressed-tensors" else None


def _compressed(quantized: Mapping[str, Any]) -> WeightType | None:
    """One group of linear layers, as llm-compressor writes it."""
    groups = quantized.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    (group,) = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        return None
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not _are_spared(quantized.get("ignore") or []):
        return None
    if isinstance(inputs, dict):
        both = weights.get("num_bits"), inputs.get("num_bits")
        return WeightType(1, 8) if both == (8, 8) else None
    if inputs is not None or quantized.get("format") != "pack-quantized":
        return None
    zeros = weights.get("symmetric") is not True
    return _weight_only(weights.get("num_bits"), weights.get("group_size"), zeros=zeros)


def _weight_only(bits: object, group: object, *, zeros: bool) -> WeightType | None:
    """Each group has a scale and, packed as the weights, a zero point; -1 or None: a whole row."""
    if type(bits) is not int or bits not in (4, 8):
        return None
    if group is None or group == -1:
        return WeightType(bits / 8, 16)
    if type(group) is not int or group < 1:
        return None
    return WeightType(bits / 8 + (_SCALE_BYTES + (bits / 8 if zeros else 0)) / group, 16)


def _are_spared(names: object) -> bool:
    """Whether only such layers are left unquantised that no format quantises."""
    return isinstance(names, list) and all(
        isinstance(name, str) and name.rstrip("$").endswith(_SPARED) for name in names
    )
