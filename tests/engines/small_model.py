"""A model's configuration whose bytes a token are easily counted."""

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 8 * 64,
    "torch_dtype": "bfloat16",
}
RANK_BYTES = 2 * 3 * 2 * 64 * 2
"""Of one of two ranks: keys and values, layers, KV heads, head size, bytes."""
