"""Causal attention within packed sequences, to train with."""

from torch_hybrid.ops.packed_attention.op import (
    packed_attention_backward,
    packed_attention_forward,
)

__all__ = ["packed_attention_backward", "packed_attention_forward"]
