"""A random Llama, small enough for a CPU: 4 layers, 4,096 bytes of KV cache a token.

Only its configuration and a tokenizer of made-up words are files; the weights are made by the
engine (``--load-format dummy``), the same ones each time.
"""

from __future__ import annotations

import json
from pathlib import Path

WORDS = 2048
LAYERS, KV_HEADS, HEAD_DIM, DTYPE_BYTES = 4, 4, 32, 4
BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * DTYPE_BYTES
FIRST_WORD = 3
"""Tokens below it are special."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": WORDS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}


def write_model(folder: Path, most_tokens: int) -> Path:
    """Write the model for contexts of up to ``most_tokens`` into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(FIRST_WORD, WORDS)}
    files = {
        "config.json": _CONFIG | {"max_position_embeddings": most_tokens},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": _TOKENIZER | {"model_max_length": most_tokens},
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
