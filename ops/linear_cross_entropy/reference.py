"""Mathematics of the loss of a head: whole logits, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torch_hybrid.ops.linear_cross_entropy.op import IGNORED


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> Tensor:
    """Sum the losses of targets [T] under logits ``hidden [T, D] @ weight [V, D].T``."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
