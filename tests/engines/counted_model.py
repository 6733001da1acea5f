"""A transformer that runs with numpy and counts each multiplication and addition of a product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class CountedModel:
    """Random weights of the shape of a ``config.json``; ``prefill`` goes on behind its own cache.

    Norms, rotations, the softmax's own work and activations' are not counted, and neither are
    products with a masked key: these are never computed here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.operations = 0
        self._random = np.random.default_rng(7)
        self._weights: dict[str, Array] = {}
        self._cache: dict[int, tuple[Array, Array]] = {}

    @property
    def weights(self) -> int:
        """How many there are, those of experts that nobody was sent to included."""
        return sum(weight.size for weight in self._weights.values())

    def prefill(self, inputs: Array) -> Array:
        """The logits of the last token of ``inputs`` (tokens x hidden)."""
        for layer in range(self.config["num_hidden_layers"]):
            attend = self._latent if "kv_lora_rank" in self.config else self._attend
            inputs = inputs + attend(_normal(inputs), layer)
            inputs = inputs + self._feed_forward(_normal(inputs), layer)
        return self._product(_normal(inputs[-1:]), "head", self.config["vocab_size"])

    def _product(self, inputs: Array, name: str, width: int) -> Array:
        shape = inputs.shape[1], width
        if name not in self._weights:
            self._weights[name] = self._random.normal(size=shape) / np.sqrt(shape[0])
        assert self._weights[name].shape == shape
        return self._counted(inputs, self._weights[name])

    def _counted(self, left: Array, right: Array) -> Array:
        self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return left @ right

    def _attend(self, inputs: Array, layer: int) -> Array:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["head_dim"]
        queries = self._product(inputs, f"{layer}.q", heads * size).reshape(-1, heads, size)
        keys = self._product(inputs, f"{layer}.k", kv_heads * size).reshape(-1, kv_heads, size)
        values = self._product(inputs, f"{layer}.v", kv_heads * size).reshape(-1, kv_heads, size)
        return self._mix(queries, keys, values, layer)

    def _latent(self, inputs: Array, layer: int) -> Array:
        config, heads = self.config, self.config["num_attention_heads"]
        plain, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        size = config["v_head_dim"]
        before = inputs
        if config["q_lora_rank"]:
            before = self._product(inputs, f"{layer}.qa", config["q_lora_rank"])
        queries = self._product(before, f"{layer}.q", heads * (plain + rope))
        down = self._product(inputs, f"{layer}.kva", config["kv_lora_rank"] + rope)
        up = self._product(down[:, :-rope], f"{layer}.kvb", heads * (plain + size))
        up = up.reshape(-1, heads, plain + size)
        shared = np.repeat(down[:, None, -rope:], heads, axis=1)
        keys = np.concatenate([up[:, :, :plain], shared], axis=2)
        return self._mix(queries.reshape(-1, heads, plain + rope), keys, up[:, :, plain:], layer)

    def _mix(self, queries: Array, keys: Array, values: Array, layer: int) -> Array:
        """Causal attention, one query and head at a time, and the output projection."""
        if layer in self._cache:
            old_keys, old_values = self._cache[layer]
            keys, values = np.concatenate([old_keys, keys]), np.concatenate([old_values, values])
        self._cache[layer] = keys, values
        tokens, heads, size = queries.shape
        out = np.empty((tokens, heads, values.shape[2]))
        for token in range(tokens):
            seen = len(keys) - tokens + token + 1
            for head in range(heads):
                kv_head = head * keys.shape[1] // heads
                scores = self._counted(queries[token, head][None], keys[:seen, kv_head].T)
                shares = np.exp(scores / np.sqrt(size))
                out[token, head] = self._counted(shares / shares.sum(), values[:seen, kv_head])[0]
        return self._product(out.reshape(tokens, -1), f"{layer}.o", self.config["hidden_size"])

    def _feed_forward(self, inputs: Array, layer: int) -> Array:
        config = self.config
        experts = config.get("n_routed_experts") or config.get("num_local_experts")
        experts = experts or config.get("num_experts")
        if not experts or layer < config.get("first_k_dense_replace", 0):
            width = config.get("ffn_dim") or config["intermediate_size"]
            return self._block(inputs, f"{layer}.mlp", width)
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        sent = self._product(inputs, f"{layer}.router", experts).argsort(axis=1)
        out = np.zeros_like(inputs)
        for expert in range(experts):
            mine = (sent[:, : config["num_experts_per_tok"]] == expert).any(axis=1)
            out[mine] += self._block(inputs[mine], f"{layer}.{expert}", width)
        for shared in range(config.get("n_shared_experts", 0)):
            out += self._block(inputs, f"{layer}.shared{shared}", width)
        if "shared_expert_intermediate_size" in config:
            gate = self._product(inputs, f"{layer}.gate", 1)
            width = config["shared_expert_intermediate_size"]
            out += gate * self._block(inputs, f"{layer}.shared", width)
        return out

    def _block(self, inputs: Array, name: str, width: int) -> Array:
        up = self._product(inputs, name + ".up", width)
        if "ffn_dim" not in self.config:
            up = up * np.tanh(self._product(inputs, name + ".gate", width))
        return self._product(np.maximum(up, 0), name + ".down", self.config["hidden_size"])


def _normal(inputs: Array) -> Array:
    scale: Array = inputs / np.sqrt((inputs**2).mean(axis=1, keepdims=True) + 1e-9)
    return scale
