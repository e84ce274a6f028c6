"""Implementation "torch": the linear layers one by one, for GPUs and hosts without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.linear.op import Linear


def linear(x: Linear) -> Tensor:
    """Dequantize weights that have scales, and multiply by one weight after the other."""
    wide = [dequantized(weight, scale, x.x.dtype) for weight, scale in x.scaled]
    weights = [*wide, *x.weights[len(wide) :]]
    outs = [F.linear(x.x, weight, bias) for weight, bias in zip(weights, x.biases, strict=True)]
    return torch.cat(outs, dim=1)
