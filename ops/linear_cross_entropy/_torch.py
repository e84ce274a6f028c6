"""Cross entropy of a head by chunks of rows, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.linear_cross_entropy.op import (
    IGNORED,
    LinearCrossEntropyBackward,
    LinearCrossEntropyForward,
    empty_results,
)

_FEWEST_ROWS = 256  # of a chunk: each adds once to the gradient of all weights
_BLOCK = 2048  # rows of weights on a CPU, whose product stays in the cache until it is added


@without_autocast
def linear_cross_entropy_forward(x: LinearCrossEntropyForward) -> tuple[Tensor, ...]:
    """Take as many rows at once as have logits about as large as all hidden states."""
    hidden, weight = x.hidden, x.weight
    total, dhidden, dweight = empty_results(x)
    total.zero_()
    sums = torch.zeros_like(dweight, dtype=total.dtype)
    most = min(len(hidden), max(_FEWEST_ROWS, -(-hidden.numel() // weight.shape[0])))
    # Of each chunk; memory is slow at its first use.
    logits = hidden.new_empty(most, len(weight))
    log_probs = torch.empty_like(logits, dtype=total.dtype)
    for start in range(0, len(hidden), max(most, 1)):
        rows = slice(start, start + most)
        h, target, counts = hidden[rows], x.targets[rows, None], x.targets[rows, None] != IGNORED
        z, p = logits[: len(h)], log_probs[: len(h)]
        torch.mm(h, weight.T, out=z)
        if x.softcap is not None:
            z.div_(x.softcap).tanh_().mul_(x.softcap)
        torch.log_softmax(z, -1, total.dtype, out=p)
        picked = p.gather(1, target.clamp(min=0))
        total -= picked.where(counts, 0.0).sum()
        if not x.of_hidden and not x.of_weight:
            continue
        p.exp_().scatter_add_(1, target.clamp(min=0), -torch.ones_like(picked))
        if x.softcap is not None:
            p.mul_(z.to(p.dtype).div(x.softcap).square_().neg_().add_(1))
        dlogits = p.masked_fill_(~counts, 0.0).to(hidden.dtype)
        if x.of_hidden:
            torch.mm(dlogits, weight, out=dhidden[rows])
        if x.of_weight:
            _add_product(sums, dlogits.T, h)
    return total, dhidden, sums.to(weight.dtype)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of ``a [V, R]`` and ``b [R, D]`` to sums of their dtype or a wider one."""
    if sums.dtype == a.dtype:
        sums.addmm_(a, b)
        return
    size = _BLOCK if sums.device.type == "cpu" else len(sums)
    for block, rows in zip(sums.split(size), a.split(size), strict=True):
        block += rows @ b


def linear_cross_entropy_backward(x: LinearCrossEntropyBackward) -> tuple[Tensor, Tensor]:
    """Scale the gradients that the forward made."""
    dhidden, dweight = x.dhidden * x.dtotal, x.dweight * x.dtotal
    return dhidden.to(x.dhidden.dtype), dweight.to(x.dweight.dtype)
