"""Cross entropy of a head by chunks of rows, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.linear_cross_entropy.op import (
    IGNORED,
    LinearCrossEntropyBackward,
    LinearCrossEntropyForward,
    empty_results,
)
from torch_hybrid.ops.native.matrix_product import multiply

# Rows of a chunk: each adds once to the gradient of all weights, unless it is the only one.
_FEWEST_ROWS, _FEWEST_ROWS_ON_A_CPU = 256, 1024
_BLOCK = 2048  # rows of weights on a CPU, whose product stays in the cache until it is added
_CACHED = 2**19  # logits on a CPU that stay in the cache from their maximum to their gradient


def differentiated(x: LinearCrossEntropyForward, z: Tensor, targets: Tensor) -> Tensor:
    """Put the gradients of losses in the place of logits.

    Args:
        x: arguments of the forward.
        z: [R, V] logits before their bound; mutated if gradients are asked for.
        targets: [R] targets.

    Returns:
        The sum [] of losses.
    """
    cap, counts, target = x.softcap, targets[:, None] != IGNORED, targets[:, None].clamp(min=0)
    few = max(1, _CACHED // z.shape[1]) if z.device.type == "cpu" else max(1, len(z))
    total = z.new_zeros((), dtype=torch.promote_types(z.dtype, torch.float32))
    scratch = torch.empty_like(z[:few], dtype=total.dtype)  # memory is slow at its first use
    for part, at, count in zip(*(each.split(few) for each in (z, target, counts)), strict=True):
        p = scratch[: len(part)]
        bounded = part if cap is None else cap * (part.to(p.dtype) / cap).tanh_()
        torch.log_softmax(bounded, -1, p.dtype, out=p)
        picked = p.gather(1, at)
        total -= picked.where(count, 0.0).sum()
        if x.of_hidden or x.of_weight:
            p.exp_().scatter_add_(1, at, -torch.ones_like(picked))
            if cap is not None:
                p.mul_(1 - (bounded / cap).square_())
            part.copy_(p)
    return total


@without_autocast
def linear_cross_entropy_forward(
    x: LinearCrossEntropyForward, *, differentiated: Callable[..., Tensor] = differentiated
) -> tuple[Tensor, ...]:
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
    logits = hidden.new_empty(most, len(weight))  # of each chunk: memory is slow at its first use
    for start in range(0, len(hidden), max(most, 1)):
        rows = slice(start, start + most)
        counts = x.targets[rows, None] != IGNORED
        h = hidden[rows].where(counts, 0.0)
        z = multiply(h, weight.T, logits[: len(h)])
        total += differentiated(x, z, x.targets[rows])
        if x.of_hidden:
            multiply(z, weight, dhidden[rows]).masked_fill_(~counts, 0.0)
        if x.of_weight and is_whole:
            multiply(z.T, h, dweight)
        elif x.of_weight:
            _add_product(sums, z.T, h)
    return total, dhidden, sums.to(weight.dtype)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of ``a [V, R]`` and ``b [R, D]`` to sums of their dtype or a wider one."""
    if sums.dtype == a.dtype:
        multiply(a, b, sums, adds=True)
        return
    size = _BLOCK if sums.device.type == "cpu" else len(sums)
    for block, rows in zip(sums.split(size), a.split(size), strict=True):
        block += rows @ b


def linear_cross_entropy_backward(x: LinearCrossEntropyBackward) -> tuple[Tensor, Tensor]:
    """Scale the gradients that the forward made."""
    dhidden, dweight = x.dhidden * x.dtotal, x.dweight * x.dtotal
    return dhidden.to(x.dhidden.dtype), dweight.to(x.dweight.dtype)
