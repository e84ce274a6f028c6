"""The linear layers one by one, through torch: for a GPU, and for machines without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.stored_weights import dequantized


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
) -> Tensor:
    """See ``torch_hybrid.ops.linear.op.linear``."""
    if scales is not None:
        scaled = zip(weights, scales, strict=False)
        others = weights[len(scales) :]
        weights = [*(dequantized(weight, scale, x.dtype) for weight, scale in scaled), *others]
    outs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(outs, dim=1)
