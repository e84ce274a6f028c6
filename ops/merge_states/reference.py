"""The oracle: both sums of exponentials taken apart and added."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.merge_states.op import MergeStates


def merge_states(x: MergeStates) -> tuple[Tensor, Tensor]:
    """Compute ``e^(lse_a - lse) o_a + e^(lse_b - lse) o_b``, ``lse = log(e^lse_a + e^lse_b)``."""
    work = torch.promote_types(x.o_a.dtype, torch.float32)
    lse = torch.logaddexp(x.lse_a.to(work), x.lse_b.to(work))
    weight_a, weight_b = (
        torch.where(part == -torch.inf, 0, torch.exp(part.to(work) - lse))[..., None]
        for part in (x.lse_a, x.lse_b)
    )
    return (weight_a * x.o_a.to(work) + weight_b * x.o_b.to(work)).to(x.o_a.dtype), lse
