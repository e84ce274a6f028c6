"""Attention within packed sequences by torch's flash kernel for a CPU, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.packed_attention.op import (
    PackedAttentionBackward,
    PackedAttentionForward,
    empty_gradients,
    empty_results,
)

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention_forward(x: PackedAttentionForward) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps."""
    out, lse = (each.zero_() for each in empty_results(x))
    for rows in _sequences(x.cu_seqlens):
        o, sums = _FORWARD(*(_heads(x, y, rows) for y in (x.q, x.k, x.v)), 0.0, True, scale=x.scale)
        out[rows] = o[0].transpose(0, 1)[..., : x.v.shape[2]]
        lse[rows] = sums[0].T
    return out, lse


def packed_attention_backward(x: PackedAttentionBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k and v."""
    grads = tuple(each.zero_() for each in empty_gradients(x))
    for rows in _sequences(x.cu_seqlens):
        dout, q, k, v, out = (_heads(x, y, rows) for y in (x.dout, x.q, x.k, x.v, x.out))
        lse = x.lse[rows].T.contiguous()[None]
        made = _BACKWARD(dout, q, k, v, out, lse, 0.0, True, scale=x.scale)
        for grad, padded in zip(grads, made, strict=True):
            of_heads = padded[0, ..., : grad.shape[2]].unflatten(0, (grad.shape[1], -1))
            grad[rows] = of_heads.sum(1).transpose(0, 1)
    return grads


def _sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    """Yield the rows of each sequence that has some."""
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            yield slice(start, end)


def _heads(x: PackedAttentionForward, y: Tensor, rows: slice) -> Tensor:
    """View rows of ``y`` as [1, H, length, D], repeated for each head, padded to one width."""
    dim = max(x.q.shape[2], x.v.shape[2])
    y = y[rows] if y.shape[2] == dim else pad(y[rows], (0, dim - y.shape[2]))
    return y.transpose(0, 1)[None].repeat_interleave(x.q.shape[1] // y.shape[1], 1)
