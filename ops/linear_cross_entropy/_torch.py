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

# Rows of a chunk: each adds once to the gradient of all weights, unless it is the only one.
_FEWEST_ROWS, _FEWEST_ROWS_ON_A_CPU = 256, 1024
_BLOCK = 2048  # rows of weights on a CPU, whose product stays in the cache until it is added
_CACHED = 2**19  # logits on a CPU that stay in the cache from their maximum to their gradient


@without_autocast
def linear_cross_entropy_forward(x: LinearCrossEntropyForward) -> tuple[Tensor, ...]:
    """Take as many rows at once as have logits about as large as all hidden states.

    Gradients of logits take the place of these.
    """
    hidden, weight, on_cpu = x.hidden, x.weight, x.hidden.device.type == "cpu"
    total, dhidden, dweight = empty_results(x)
    total.zero_()
    size = -(-hidden.numel() // weight.shape[0])
    most = min(len(hidden), max(_FEWEST_ROWS_ON_A_CPU if on_cpu else _FEWEST_ROWS, size))
    is_whole = most == len(hidden) > 0
    sums = dweight if is_whole else torch.zeros_like(dweight, dtype=total.dtype)
    # Of each chunk; memory is slow at its first use.
    logits = hidden.new_empty(most, len(weight))
    few = min(most, max(1, _CACHED // len(weight))) if on_cpu else most
    log_probs = torch.empty_like(logits[:few], dtype=total.dtype)
    for start in range(0, len(hidden), max(most, 1)):
        rows = slice(start, start + most)
        counts = x.targets[rows, None] != IGNORED
        h = hidden[rows].where(counts, 0.0)
        z = torch.mm(h, weight.T, out=logits[: len(h)])
        for block, target, count in zip(
            *(each.split(max(few, 1)) for each in (z, x.targets[rows, None], counts)), strict=True
        ):
            total -= _differentiate(x, block, target, count, log_probs[: len(block)])
        if x.of_hidden:
            torch.mm(z, weight, out=dhidden[rows]).masked_fill_(~counts, 0.0)
        if x.of_weight and is_whole:
            torch.mm(z.T, h, out=dweight)
        elif x.of_weight:
            _add_product(sums, z.T, h)
    return total, dhidden, sums.to(weight.dtype)


def _differentiate(
    x: LinearCrossEntropyForward, z: Tensor, target: Tensor, counts: Tensor, p: Tensor
) -> Tensor:
    """Put the gradients of losses in the place of logits ``z [R, V]``.

    Args:
        x: arguments of the forward.
        z: [R, V] logits before their bound; mutated if gradients are asked for.
        target: [R, 1] targets; ``counts`` [R, 1] tells which have a loss.
        p: [R, V] scratch in the dtype of sums.

    Returns:
        The sum [] of log probabilities of targets.
    """
    cap = x.softcap
    bounded = z if cap is None else cap * (z.to(p.dtype) / cap).tanh_()
    torch.log_softmax(bounded, -1, p.dtype, out=p)
    picked = p.gather(1, target.clamp(min=0))
    total = picked.where(counts, 0.0).sum()
    if not x.of_hidden and not x.of_weight:
        return total
    p.exp_().scatter_add_(1, target.clamp(min=0), -torch.ones_like(picked))
    if cap is not None:
        p.mul_(1 - (bounded / cap).square_())
    z.copy_(p)
    return total


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
