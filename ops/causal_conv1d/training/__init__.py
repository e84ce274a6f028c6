"""Convolution without a pool, which a backward goes through: the form to train with."""

from torch_hybrid.ops.causal_conv1d.training.op import (
    causal_conv1d_backward,
    causal_conv1d_forward,
)

__all__ = ["causal_conv1d_backward", "causal_conv1d_forward"]
