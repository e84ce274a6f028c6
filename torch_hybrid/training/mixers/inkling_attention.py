"""Attention with biases by distance within packed sequences, by what trains of torch.

A kernel for a CPU takes biases and gives them no gradient. So here are blocks of queries, whose
weights the backward makes again, in an op: it reads the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.training.flex_attention import attend_with_biases
from torch_hybrid.training.mixers.twin import work_dtype

_BLOCK = 128


@without_autocast
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        bias: [T, H, R] in that dtype: what a query adds to the logit of the key at each distance.
            Those at R or more have 0.
        cu_seqlens: [N + 1] int32 offsets from 0 to T; equal ones are empty sequences.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        dropout: probability to drop a weight. Above 0, and on a GPU for float64, T x T weights are
            made.

    Returns:
        [T, H, V], and the logarithms [T, H] of sums of weights, float32 or float64.
    """
    check_no_tangents("biased_attention", q, k, v, bias)
    if dropout or (q.is_cuda and q.dtype == torch.float64):
        return _masked_attention(q, k, v, bias, cu_seqlens, scale, window, dropout)
    if q.is_cuda:
        return attend_with_biases(q, k, v, bias, cu_seqlens, scale, window)
    made: tuple[Tensor, Tensor] = biased_attention_forward(q, k, v, bias, cu_seqlens, scale, window)
    return made


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attend by all T x T weights at once."""
    row = torch.arange(len(q), dtype=torch.int64, device=q.device)
    seq = torch.searchsorted(cu_seqlens, row, right=True)
    before = (row[:, None] - row).masked_fill(seq[:, None] != seq, -1)
    logits = _logits(_by_key_head(q, k), k, bias, before, scale, window)
    lse = logits.logsumexp(-1, keepdim=True)
    weights = drop((logits - lse).exp(), dropout)
    out = torch.bmm(weights, _by_key_head(v, v))
    return _by_token(out, q).to(q.dtype), _by_token(lse, q)[..., 0]


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """Order rows [Q, H, D] by the HKV heads of keys: [HKV, H / HKV * Q, D], in sums' dtype."""
    heads: Tensor = x.to(work_dtype(x)).unflatten(1, (k.shape[1], -1))
    return heads.permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(x: Tensor, q: Tensor) -> Tensor:
    """Order them as queries [Q, H, K] are."""
    heads: Tensor = x.unflatten(1, (-1, q.shape[0]))
    return heads.permute(2, 0, 1, 3).flatten(1, 2)


def _logits(
    q: Tensor, k: Tensor, bias: Tensor, before: Tensor, scale: float, window: int | None
) -> Tensor:
    """Compute logits [HKV, H / HKV * Q, K] of queries that are ordered by heads of keys.

    ``before`` [Q, K] is the distance of a key from a query; negative ones are not seen.
    """
    logits = torch.bmm(q * scale, _by_key_head(k, k).mT)
    reach = bias.shape[-1]
    bias = pad(pad(bias.to(q.dtype), (0, 1)), (0, 1), value=-torch.inf)
    bias = bias.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    is_seen = before >= 0 if window is None else (before >= 0) & (before < window)
    place = torch.where(is_seen, before.clamp(max=reach), reach + 1)
    added = bias.gather(-1, place.expand(*bias.shape[:2], -1, -1))
    return logits.add_(added.flatten(1, 2))


@torch.library.custom_op("torch_hybrid::biased_attention_forward", mutates_args=())
def biased_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attend by blocks of queries on a CPU; see :func:`biased_attention`."""
    out, lse = _empty_results(q, k, v)
    for rows, keys, before in _parts(cu_seqlens, window):
        own, near = q[rows], slice(before.shape[1])  # no key is farther
        of_rows = _by_key_head(own, k), k[keys], bias[rows, :, near]
        weights = _logits(*of_rows, before, scale, window)
        most = weights.amax(-1, keepdim=True)
        weights = weights.sub_(most).exp_()
        sums = weights.sum(-1, keepdim=True)
        out[rows] = _by_token(torch.bmm(weights, _by_key_head(v[keys], v)) / sums, own)
        lse[rows] = _by_token(most + sums.log(), own)[..., 0]
    return out, lse


@torch.library.custom_op("torch_hybrid::biased_attention_backward", mutates_args=())
def biased_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and bias."""
    work = work_dtype(q)
    dq, dbias = q.new_empty(q.shape), bias.new_zeros(bias.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=work) for x in (k, v))
    distance = torch.arange(bias.shape[-1], dtype=torch.int64, device=q.device)
    for rows, keys, before in _parts(cu_seqlens, window):
        given = (x[rows] for x in (q, dout, lse[..., None], dlse[..., None]))
        own, dy, sums, dsums = (_by_key_head(x, k) for x in given)
        near = slice(before.shape[1])
        weights = _logits(own, k[keys], bias[rows, :, near], before, scale, window)
        weights = weights.sub_(sums).exp_()
        dv[keys] += torch.bmm(weights.mT, dy).transpose(0, 1)
        dweights = torch.bmm(dy, _by_key_head(v[keys], v).mT)
        shared = (weights * dweights).sum(-1, keepdim=True) - dsums
        dlogits = dweights.sub_(shared).mul_(weights)
        dq[rows] = _by_token(torch.bmm(dlogits, _by_key_head(k[keys], k)) * scale, q[rows])
        dk[keys] += torch.bmm(dlogits.mT, own * scale).transpose(0, 1)
        key = before[:, :1] - distance[near]  # number of the key at each distance
        of_keys = dlogits.unflatten(1, (-1, key.shape[0]))
        dbiases = of_keys.gather(-1, key.clamp(min=0).expand(*of_keys.shape[:2], -1, -1))
        dbias[rows, :, near] = _by_token(dbiases.masked_fill_(key < 0, 0.0).flatten(1, 2), q[rows])
    return dq, dk.to(q.dtype), dv.to(q.dtype), dbias


def _parts(cu_seqlens: Tensor, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows of queries, the rows of keys that they read, and how far before these are."""
    for start, end in pairwise(cu_seqlens.tolist()):
        for first in range(start, end, _BLOCK):
            rows = slice(first, min(first + _BLOCK, end))
            keys = slice(start if window is None else max(start, first - window + 1), rows.stop)
            row, key = (
                torch.arange(each.start, each.stop, dtype=torch.int64, device=cu_seqlens.device)
                for each in (rows, keys)
            )
            yield rows, keys, row[:, None] - key


@biased_attention_forward.register_fake
def _empty_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Make tensors as a forward returns them."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=work_dtype(q))


@biased_attention_backward.register_fake
def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Make tensors as a backward returns them."""
    return tuple(each.new_empty(each.shape) for each in (q, k, v, bias))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what is given, and the logarithms of sums."""
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.options = inputs[5:]


@without_autocast
def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of what is given."""
    made = biased_attention_backward(*ctx.saved_tensors, dout, dlse, *ctx.options)
    return *made, None, None, None


biased_attention_forward.register_autograd(_backward, setup_context=_keep)
