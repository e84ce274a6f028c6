"""The oracle: both sums of exponentials taken apart and added."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``lse = log(e^lse_a + e^lse_b)``, ``o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b``."""
    work = torch.promote_types(o_a.dtype, torch.float32)
    lse = torch.logaddexp(lse_a.to(work), lse_b.to(work))
    weight_a, weight_b = (
        torch.where(part == -torch.inf, 0, torch.exp(part.to(work) - lse))[..., None]
        for part in (lse_a, lse_b)
    )
    return (weight_a * o_a.to(work) + weight_b * o_b.to(work)).to(o_a.dtype), lse
