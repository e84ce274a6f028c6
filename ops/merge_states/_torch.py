"""Implementation "torch": elementwise, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.merge_states.op import MergeStates


def merge_states(x: MergeStates) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::merge_states``."""
    # Rows without keys on either side have largest = -inf: weighed by e^-inf = 0, total 0.
    largest = torch.maximum(x.lse_a, x.lse_b)
    shift = largest.clamp(min=torch.finfo(torch.float32).min)
    weight_a, weight_b = torch.exp(x.lse_a - shift), torch.exp(x.lse_b - shift)
    total = weight_a + weight_b
    lse = largest + torch.log(total)
    share_a, share_b = ((weight / total.clamp(min=1))[..., None] for weight in (weight_a, weight_b))
    return (share_a * x.o_a.float() + share_b * x.o_b.float()).to(x.o_a.dtype), lse
