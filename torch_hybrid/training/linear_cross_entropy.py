"""Output head whose loss makes no whole logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.core.registration import first_impl
from torch_hybrid.ops.linear_cross_entropy import IGNORED, linear_cross_entropy_forward


class LossHead(nn.Linear):
    """Output head that computes a summed cross entropy if it is given targets."""

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        softcap: float | None = None,
        vocab_size: int | None = None,
    ) -> Tensor:
        """Map hidden states to logits, or with ``targets`` [...] int64 to the sum of losses.

        ``softcap`` bounds the logits of losses alone, which are ``vocab_size`` ones, or all.
        """
        if targets is None:
            return super().forward(hidden)
        check_no_tangents("linear_cross_entropy", hidden, self.weight)
        kind = hidden.device.type
        by_autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if by_autocast else self.weight.dtype
        # Backbones may keep their residuals in float32.
        weight = self.weight if vocab_size is None else self.weight[:vocab_size]
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        is_recording = torch.is_grad_enabled()
        return linear_cross_entropy_forward(
            *(hidden.flatten(0, -2), weight, targets.contiguous().flatten()),
            of_hidden=is_recording and hidden.requires_grad,
            of_weight=is_recording and weight.requires_grad,
            softcap=softcap,
            impl=first_impl("linear_cross_entropy_forward", hidden.device, hidden.dtype),
        )[0]


def is_plain(head: nn.Module) -> bool:
    """Tell whether an output head is one that may become a ``LossHead``."""
    return type(head) is nn.Linear and head.bias is None


def summed_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross entropies of any output head: of one with an adapter by whole logits."""
    if isinstance(head, LossHead):
        total: Tensor = head(hidden, targets)
        return total
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
