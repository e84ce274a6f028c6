"""Linear layers as their definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import rounded
from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.linear.op import Linear


def linear_reference(x: Linear) -> Tensor:
    """Compute the op in float32, or in float64 when x is float64; weights have any float dtype.

    For "triton_fp8", x is rounded to FP8 where it meets weights with scales.
    """
    dtype, compute = x.x.dtype, torch.promote_types(x.x.dtype, torch.float32)
    left = rounded(x.x) if x.impl == "triton_fp8" else x.x
    outs = [left.to(compute) @ dequantized(*pair, compute).T for pair in x.scaled]
    outs += [x.x.to(compute) @ weight.to(compute).T for weight in x.weights[len(outs) :]]
    pairs = zip(outs, x.biases, strict=True)
    sums = [y if bias is None else y + bias.to(compute) for y, bias in pairs]
    return torch.cat(sums, dim=1).to(dtype)
