"""Cross entropy of a head's logits that never exist whole: rows are taken a chunk at a time.

A chunk's logits give its loss and the gradients of hidden states and weights in the forward; the
backward scales them. So a step makes three products per chunk, as with whole logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100


class LossHead(nn.Linear):
    """Output head that computes a summed cross entropy if it is given targets."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map hidden states to logits, or with ``targets`` [...] int64 to the sum of losses."""
        if targets is None:
            return super().forward(hidden)
        weight, kind = self.weight, hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        total: Tensor = _summed(
            hidden.flatten(0, -2),
            weight,
            targets.flatten(),
            torch.is_grad_enabled() and hidden.requires_grad,
            torch.is_grad_enabled() and weight.requires_grad,
        )[0]
        return total


def _rows_of_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Choose rows whose logits are about as large as all hidden states are."""
    return max(64, -(-hidden.numel() // weight.shape[0]))


@torch.library.custom_op("torch_hybrid::linear_cross_entropy", mutates_args=())
def _summed(
    hidden: Tensor, weight: Tensor, targets: Tensor, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sum of losses, and its gradients of hidden [T, D] and weight [V, D], or none.

    Logits have the dtype of ``hidden``; losses and sums are float32 at least.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total, dhidden, dweight = _results(hidden, weight, of_hidden, of_weight)
    total.zero_()
    sums = torch.zeros_like(dweight, dtype=dtype)
    size = _rows_of_chunk(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            log_probs = (hidden[rows] @ weight.T).to(dtype).log_softmax(-1)
            target, counts = targets[rows, None], targets[rows, None] != IGNORED
            picked = log_probs.gather(1, target.clamp(min=0))
            total -= picked.where(counts, 0.0).sum()
            if not of_hidden and not of_weight:
                continue
            dlogits = log_probs.exp_()
            dlogits.scatter_add_(1, target.clamp(min=0), -torch.ones_like(picked))
            dlogits = dlogits.where(counts, 0.0).to(hidden.dtype)
            if of_hidden:
                dhidden[rows] = dlogits @ weight
            if of_weight:
                sums += dlogits.T @ hidden[rows]
    return total, dhidden, sums.to(weight.dtype)


def _results(
    hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the tensors that the op returns."""
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    dhidden = hidden.new_empty(hidden.shape if of_hidden else (0,))
    return total, dhidden, weight.new_empty(weight.shape if of_weight else (0,))


@_summed.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden, weight, of_hidden, of_weight)


@torch.library.custom_op("torch_hybrid::linear_cross_entropy_backward", mutates_args=())
def _scaled(
    hidden: Tensor, weight: Tensor, dhidden: Tensor, dweight: Tensor, dtotal: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale the gradients that the forward made.

    It is an op, of what the forward was given, so that a second derivative is an error.
    """
    return (dhidden * dtotal).to(dhidden.dtype), (dweight * dtotal).to(dweight.dtype)


@_scaled.register_fake
def _(
    hidden: Tensor, weight: Tensor, dhidden: Tensor, dweight: Tensor, dtotal: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dhidden), torch.empty_like(dweight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, ctx.of_hidden, ctx.of_weight = inputs
    ctx.save_for_backward(hidden, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dtotal: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweight = _scaled(*ctx.saved_tensors, dtotal)
    made = dhidden if ctx.of_hidden else None, dweight if ctx.of_weight else None
    return *made, None, None, None


_summed.register_autograd(_gradients, setup_context=_save)
