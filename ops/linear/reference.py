"""Linear layers as their definition, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import rounded
from torch_hybrid.ops.formats.stored_weights import dequantized


def linear_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
    rounds: bool = False,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype; with ``rounds``, what meets weights
    with scales of x is in 8 bits too.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    dtype, compute = x.dtype, torch.promote_types(x.dtype, torch.float32)
    left = rounded(x) if rounds else x
    scales = scales or ()
    outs = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if i < len(scales):
            y = left.to(compute) @ dequantized(weight, scales[i], compute).T
        else:
            y = x.to(compute) @ weight.to(compute).T
        outs.append(y if bias is None else y + bias.to(compute))
    return torch.cat(outs, dim=1).to(dtype)
