"""Output head whose loss makes no whole logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.linear_cross_entropy import linear_cross_entropy_forward


class LossHead(nn.Linear):
    """Output head that computes a summed cross entropy if it is given targets."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map hidden states to logits, or with ``targets`` [...] int64 to the sum of losses."""
        if targets is None:
            return super().forward(hidden)
        check_no_tangents("linear_cross_entropy", hidden, self.weight)
        weight, kind = self.weight, hidden.device.type
        rounds = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if rounds else weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)  # of Mamba, hidden may be wider
        is_recording = torch.is_grad_enabled()
        return linear_cross_entropy_forward(
            *(hidden.flatten(0, -2), weight, targets.flatten()),
            of_hidden=is_recording and hidden.requires_grad,
            of_weight=is_recording and weight.requires_grad,
            impl="torch",
        )[0]
