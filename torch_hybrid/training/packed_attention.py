"""Causal attention within the sequences of packed rows, by kernels of torch that train.

On a CPU each sequence is a call of torch's flash kernel, so no T x T mask is ever made. That loop
reads the lengths, so it is an op: a graph has it as one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        cu_seqlens: [N + 1] int32 offsets from 0 to T; equal ones are empty sequences.
        scale: factor on products.
        dropout: probability to drop a weight; above 0 a T x T mask is made.

    Returns:
        [T, H, V].
    """
    if q.device.type == "cpu" and not dropout:
        out: Tensor = _by_sequence(q, k, v, cu_seqlens, scale)[0]
        return out
    if q.is_cuda and not dropout and q.dtype in _VARLEN_DTYPES:
        return _varlen(q, k, v, cu_seqlens, scale)
    return _masked(q, k, v, cu_seqlens, scale, dropout)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    length, v_dim = len(q), v.shape[2]
    out = varlen_attn(
        *(q, k, _wide(v, k.shape[2]), cu_seqlens, cu_seqlens, length, length),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[..., :v_dim]


def _masked(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, dropout: float
) -> Tensor:
    row = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    seq = torch.searchsorted(cu_seqlens, row, right=True)
    sees = (seq[:, None] == seq) & (row[:, None] >= row)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=sees,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _wide(x: Tensor, dim: int) -> Tensor:
    return pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x


def _sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    """Yield the rows of each sequence that has some."""
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            yield slice(start, end)


def _heads(x: Tensor, rows: slice, num_heads: int, dim: int) -> Tensor:
    """View rows of ``x [T, H, D]`` as [1, num_heads, length, dim], padded and repeated."""
    heads = _wide(x[rows], dim).transpose(0, 1)[None]
    return heads.repeat_interleave(num_heads // x.shape[1], 1)


@torch.library.custom_op("torch_hybrid::packed_attention", mutates_args=())
def _by_sequence(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute outputs [T, H, V] and log-sum-exps [T, H] in float32 or float64."""
    num_heads, dim = q.shape[1], max(q.shape[2], v.shape[2])
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows in _sequences(cu_seqlens):
        o, sums = _FORWARD(
            *(_heads(x, rows, num_heads, dim) for x in (q, k, v)), 0.0, True, scale=scale
        )
        out[rows] = o[0].transpose(0, 1)[..., : v.shape[2]]
        lse[rows] = sums[0].T
    return out, lse


@_by_sequence.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


@torch.library.custom_op("torch_hybrid::packed_attention_backward", mutates_args=())
def _by_sequence_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    num_heads, dim = q.shape[1], max(q.shape[2], v.shape[2])
    grads = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    for rows in _sequences(cu_seqlens):
        dout_, q_, k_, v_, out_ = (_heads(x, rows, num_heads, dim) for x in (dout, q, k, v, out))
        lse_ = lse[rows].T.contiguous()[None]
        made = _BACKWARD(dout_, q_, k_, v_, out_, lse_, 0.0, True, scale=scale)
        for grad, x in zip(grads, made, strict=True):
            of_heads = x[0, ..., : grad.shape[2]].unflatten(0, (grad.shape[1], -1))
            grad[rows] = of_heads.sum(1).transpose(0, 1)
    return grads[0], grads[1], grads[2]


@_by_sequence_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_by_sequence_backward(*ctx.saved_tensors, dout.contiguous(), ctx.scale), None, None


_by_sequence.register_autograd(_gradients, setup_context=_save)
