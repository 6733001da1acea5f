"""What computing a prompt asks of the devices: floating point operations, and bytes of memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

_ALL_MET = 5
"""Times kept over used weights: tokens after which even routing leaves out e^-5 of the experts."""


@dataclass(frozen=True)
class ModelArithmetic:
    """A model's dimensions as the arithmetic of its prefill, summed over all devices.

    A multiplication and an addition are two operations. ``linear_flops_per_token``: 2 x the weights
    that one token is multiplied with (of a mixture of experts those it is sent to), without
    embedding and head. ``attention_flops_per_pair``: of one query and one key, over all layers,
    2 x heads x (size of a key + size of a value): QK^T and PV. ``head_flops``: the logits, which a
    prefill computes for its last token only. ``weight_bytes`` are read at least once in each pass
    over the layers; ``tokens_per_pass`` is the engine's bound of a chunked prefill, None: unbounded
    or unknown. Formula: Narayanan et al. 2021 (Megatron-LM), appendix, without the backward pass.
    """

    linear_flops_per_token: int
    attention_flops_per_pair: int
    head_flops: int
    weight_bytes: int
    kv_bytes_per_token: int
    devices: int = 1
    """That share the work: tensor x pipeline parallelism."""
    item_bits: int = 16
    """Of the type that the linear layers are multiplied in."""
    tokens_per_pass: int | None = None
    source: str = ""
    """Whence the dimensions are."""

    def prefill_flops(self, new: int, context: int) -> int:
        """Operations to compute ``new`` tokens behind ``context`` tokens, masked pairs left out.

        The pairs are new x context + new x (new + 1) / 2.
        """
        pairs = new * context + new * (new + 1) // 2
        linear = self.linear_flops_per_token * new
        return linear + self.attention_flops_per_pair * pairs + self.head_flops

    def prefill_bytes(self, new: int, context: int) -> int | None:
        """The fewest bytes of device memory that must move: weights and KV cache.

        Each pass reads the weights and the KV cache of what is before it, and writes its own.
        What passes between the layers is left out, as kernels may keep it on the chip. None for
        so few tokens of a mixture of experts that they need not meet all of them.
        """
        if new < _ALL_MET * self._kept_over_used:
            return None
        size = self.tokens_per_pass or max(new, 1)
        passes = max(1, ceil(new / size))
        before = passes * context + size * (passes * (passes - 1) // 2)
        return self.weight_bytes * passes + self.kv_bytes_per_token * (before + new)

    @property
    def _kept_over_used(self) -> float:
        """Weights there are over those that one token is multiplied with; 0 where all are."""
        used = (self.linear_flops_per_token + self.head_flops) / 2 * self.item_bits / 8
        return self.weight_bytes / used if used and self.weight_bytes > 1.1 * used else 0.0
