"""Softmax of rows whose bits do not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_ALIGNED = 32  # logits; torch's GPU kernels add up a row in another order where it begins elsewhere


def log_softmax(logits: Tensor) -> Tensor:
    """Compute log-probabilities [..., V] float32 of rows, of float64 ones float64."""
    width = logits.shape[-1]
    work = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if width % _ALIGNED:
        work = pad(work, (0, -width % _ALIGNED), value=-torch.inf)
    return work.log_softmax(dim=-1)[..., :width]
