"""Implementation "torch": elementwise, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::merge_states``."""
    # Rows without keys on either side have largest = -inf: weighed by e^-inf = 0, total 0.
    largest = torch.maximum(lse_a, lse_b)
    shift = largest.clamp(min=torch.finfo(torch.float32).min)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    lse = largest + torch.log(total)
    share_a, share_b = ((weight / total.clamp(min=1))[..., None] for weight in (weight_a, weight_b))
    return (share_a * o_a.float() + share_b * o_b.float()).to(o_a.dtype), lse
