"""Model shapes and the bytes of KV cache that one token takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvprobe.errors import KvprobeError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp32": 4}


@dataclass(frozen=True)
class ModelShape:
    """The dimensions that decide the size of a KV cache.

    ``kv_lora_rank`` and ``rope_dim`` are those of multi-head latent attention (MLA); zero for
    ordinary (grouped-query) attention. ``source`` says whence the dimensions are.
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


PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", 4, 4, 32, source="2 KiB a token: for tests and small devices"),
        ModelShape("llama-3.1-8b", 32, 8, 128, source="meta-llama/Llama-3.1-8B config.json"),
        ModelShape("llama-3-70b", 80, 8, 128, source="meta-llama/Llama-3.1-70B config.json"),
        ModelShape("qwen3-32b", 64, 8, 128, source="Qwen/Qwen3-32B config.json"),
        ModelShape(
            "deepseek-v3",
            61,
            0,
            0,
            kv_lora_rank=512,
            rope_dim=64,
            source="deepseek-ai/DeepSeek-V3 config.json; MLA, equal on all ranks",
        ),
        ModelShape(
            "moe-480b-tp8",
            62,
            8,
            128,
            tp=8,
            source="assumed: Qwen/Qwen3-Coder-480B-A35B-Instruct config.json, one KV head a rank",
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
