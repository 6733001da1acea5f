"""Model shapes and the bytes of KV cache that one token takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines._model_arithmetic import model_arithmetic
from kvprobe.errors import KvprobeError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp32": 4}


@dataclass(frozen=True)
class ModelShape:
    """The dimensions that decide the size of a KV cache.

    ``kv_lora_rank`` and ``rope_dim`` are those of multi-head latent attention (MLA); zero for
    ordinary (grouped-query) attention. ``source`` says whence the dimensions are. ``config`` is
    what else the arithmetic of a prefill depends on, in the words of the model's ``config.json``.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    tp: int = 1
    kv_lora_rank: int = 0
    rope_dim: int = 0
    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse shapes that no model has.

        Raises:
            KvprobeError: a dimension is not positive or the dtype is unknown.
        """
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise KvprobeError(f"unknown KV dtype {self.dtype!r}", f"one of {known}")
        wanted = {"layers": self.layers, "tp": self.tp}
        if self.mla:
            wanted |= {"kv_lora_rank": self.kv_lora_rank, "rope_dim": self.rope_dim}
        else:
            wanted |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for name, value in wanted.items():
            if value < 1:
                option = "--" + name.replace("_", "-")
                raise KvprobeError(f"model shape needs a positive {name}", f"set {option}")

    @property
    def mla(self) -> bool:
        """Whether the cache holds one compressed latent a layer instead of keys and values."""
        return self.kv_lora_rank > 0 or self.rope_dim > 0

    @property
    def rank_bytes_per_token(self) -> int:
        """Bytes a token takes on one tensor-parallel rank.

        Grouped-query: 2 x layers x heads of this rank x head_dim x dtype bytes; a rank holds at
        least one (replicated) head. MLA: layers x (kv_lora_rank + rope_dim) x dtype bytes, the
        same on every rank.
        """
        if self.mla:
            return self.layers * (self.kv_lora_rank + self.rope_dim) * DTYPE_BYTES[self.dtype]
        heads = max(1, self.kv_heads // self.tp)
        return 2 * self.layers * heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def stored_bytes_per_token(self) -> int:
        """Bytes a token takes in a file that holds all ranks: an MLA latent is kept once."""
        return self.rank_bytes_per_token * (1 if self.mla else self.tp)

    @property
    def arithmetic(self) -> ModelArithmetic | None:
        """Of a prefill; None for a custom shape, of which only the cache is known."""
        if not self.config:
            return None
        cache = {"kv_lora_rank": self.kv_lora_rank, "qk_rope_head_dim": self.rope_dim}
        if not self.mla:
            cache = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}
        found = model_arithmetic(
            {"num_hidden_layers": self.layers, "torch_dtype": "bfloat16", **cache, **self.config},
            tensor_parallel=self.tp,
        )
        kept = self.rank_bytes_per_token * self.tp
        return found and replace(found, kv_bytes_per_token=kept, source=self.source)


def _dense(kind: str, hidden: int, heads: int, mlp: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


_DEEPSEEK_V3 = {
    **_dense("deepseek_v3", 7168, 128, 18432, 129280),
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
_QWEN3_CODER = {
    **_dense("qwen3_moe", 6144, 96, 8192, 151936),
    "moe_intermediate_size": 2560,
    "num_experts": 160,
    "num_experts_per_tok": 8,
}
PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape(
            "tiny",
            4,
            4,
            32,
            source="2 KiB a token: for tests and small devices",
            config=_dense("llama", 256, 8, 704, 32000),
        ),
        ModelShape(
            "llama-3.1-8b",
            32,
            8,
            128,
            source="meta-llama/Llama-3.1-8B config.json",
            config=_dense("llama", 4096, 32, 14336, 128256),
        ),
        ModelShape(
            "llama-3-70b",
            80,
            8,
            128,
            source="meta-llama/Llama-3.1-70B config.json",
            config=_dense("llama", 8192, 64, 28672, 128256),
        ),
        ModelShape(
            "qwen3-32b",
            64,
            8,
            128,
            source="Qwen/Qwen3-32B config.json",
            config=_dense("qwen3", 5120, 64, 25600, 151936),
        ),
        ModelShape(
            "deepseek-v3",
            61,
            0,
            0,
            kv_lora_rank=512,
            rope_dim=64,
            source="deepseek-ai/DeepSeek-V3 config.json; MLA, equal on all ranks",
            config=_DEEPSEEK_V3,
        ),
        ModelShape(
            "moe-480b-tp8",
            62,
            8,
            128,
            tp=8,
            source="assumed: Qwen/Qwen3-Coder-480B-A35B-Instruct config.json, one KV head a rank",
            config=_QWEN3_CODER,
        ),
    )
}


def preset(name: str, **changes: int | str | None) -> ModelShape:
    """The shape called ``name``, or ``custom``, with the given dimensions put in its place.

    Raises:
        KvprobeError: no preset of that name, or a custom shape that lacks a dimension.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    if name != "custom" and name not in PRESETS:
        raise KvprobeError(f"no model preset {name!r}", f"one of {', '.join(PRESETS)}, custom")
    if name != "custom" and not given:
        return PRESETS[name]
    # The name becomes part of the folder's name: other dimensions must not share files.
    words = [name, *(f"{key}{value}" for key, value in sorted(given.items()))]
    start = {} if name == "custom" else asdict(PRESETS[name])
    fields = {"layers": 0, "kv_heads": 0, "head_dim": 0, **start, **given}
    return ModelShape(**fields | {"name": "-".join(words), "source": "command line"})
