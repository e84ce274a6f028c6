"""Attention within packed sequences by torch's flash kernel for a CPU, sequence by sequence.

That kernel's backward knows no gradients of biases and of log-sum-exps: where these are asked for,
products make the weights again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.packed_attention.op import (
    PackedAttentionBackward,
    PackedAttentionForward,
    empty_gradients,
    empty_results,
)
from torch_hybrid.ops.packed_attention.reference import added_by_distance, by_distance, seen_blocks

# Queries per call where a mask is made, which they bound; half as many as where blocks are picked.
_QUERIES = 128
_FEWEST = 8  # of 1 or 3, and many keys, the kernel's sums go by the number of threads
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention_forward(x: PackedAttentionForward) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps."""
    out, lse = (each.zero_() for each in empty_results(x))
    for rows, keys, before in _parts(x):
        q, k, v = _heads(x, x.q, rows), _heads(x, x.k, keys), _heads(x, x.v, keys)
        o, sums = _FORWARD(q, k, v, 0.0, **_seen(x, rows, before), scale=x.scale)
        out[rows] = o[0].transpose(0, 1)[..., : x.v.shape[2]]
        lse[rows] = sums[0].T
    return out, lse


def packed_attention_backward(x: PackedAttentionBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v and biases; parts are added in the dtype of sums."""
    dq, dk, dv, dbias = (each.zero_() for each in empty_gradients(x))
    sums = dq, dk.to(x.lse.dtype), dv.to(x.lse.dtype)
    by_products = x.bias is not None or x.dlse is not None
    for rows, keys, before in _parts(x, cuts_all=by_products):
        dout, q, out = (_heads(x, y, rows) for y in (x.dout, x.q, x.out))
        k, v = (_heads(x, y, keys) for y in (x.k, x.v))
        if by_products:
            made = _gradients_by_products(x, rows, before, dout, q, k, v, dbias)
        else:
            lse, seen = x.lse[rows].T.contiguous()[None], _seen(x, rows, before)
            made = _BACKWARD(dout, q, k, v, out, lse, 0.0, **seen, scale=x.scale)
        for grad, padded, of in zip(sums, made, (rows, keys, keys), strict=True):
            of_heads = padded[0, ..., : grad.shape[2]].unflatten(0, (grad.shape[1], -1))
            grad[of] += of_heads.sum(1).transpose(0, 1)
    return dq, sums[1].to(dk.dtype), sums[2].to(dv.dtype), dbias


def _gradients_by_products(
    x: PackedAttentionBackward, rows: slice, before: Tensor | None, *given: Tensor
) -> tuple[Tensor, ...]:
    """Compute gradients as the kernel does, and write those of biases, the last of ``given``."""
    dout, q, k, v = (each[0].to(x.lse.dtype) for each in given[:4])
    q = q * x.scale
    assert before is not None
    weights = torch.bmm(q, k.mT).add_(_mask(x, rows, before))
    weights = weights.sub_(x.lse[rows].T[..., None]).exp_()
    dweights = torch.bmm(dout, v.mT)
    shared = (weights * dweights).sum(-1)
    if x.dlse is not None:
        shared -= x.dlse[rows].T
    dlogits = dweights.sub_(shared[..., None]).mul_(weights)
    if x.bias is not None:
        of_bias = by_distance(dlogits, x.bias.shape[2]).transpose(0, 1)
        given[4][rows, :, : of_bias.shape[2]] = of_bias
    dq = torch.bmm(dlogits, k) * x.scale
    return dq[None], torch.bmm(dlogits.mT, q)[None], torch.bmm(weights.mT, dout)[None]


def _parts(
    x: PackedAttentionForward, *, cuts_all: bool = False
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield rows of queries, the rows of keys that they read, and how far before them these are.

    A key that a query does not see is -1 before it. Instead of distances [Q, K] comes None where
    queries see all tokens before them and no biases: no mask is made there.
    """
    for start, end in pairwise(x.cu_seqlens.tolist()):
        whole = start if cuts_all else min(end, start + _num_whole(x, end - start))
        if whole > start:
            yield slice(start, whole), slice(start, whole), None
        most = _QUERIES if x.blocks is None else 2 * _QUERIES
        firsts = [*range(whole, end, most)]
        if len(firsts) > 1 and end - firsts[-1] < _FEWEST:
            firsts.pop()
        for first, stop in pairwise([*firsts, end]):
            rows = slice(first, stop)
            begin = start if x.window is None else max(start, first - x.window + 1)
            row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=x.q.device)
            key = torch.arange(begin, rows.stop, dtype=torch.int64, device=x.q.device)
            before = row[:, None] - key
            if x.window is not None:
                before.masked_fill_(before >= x.window, -1)
            if x.blocks is not None:
                of_key = (key - start) // x.block_size
                sees = seen_blocks(x.blocks[rows], row - start, of_key, x.block_size)
                before.masked_fill_(~sees, -1)
            yield rows, slice(begin, rows.stop), before


def _num_whole(x: PackedAttentionForward, length: int) -> int:
    """Count the first tokens of a sequence that see all tokens before them, without biases."""
    if x.bias is not None:
        return 0
    if x.blocks is not None:
        return (x.blocks.shape[1] + 1) * x.block_size - 1
    return 0 if x.window is not None and x.window < length else length


def _seen(x: PackedAttentionForward, rows: slice, before: Tensor | None) -> dict[str, Any]:
    """Tell the kernel what queries see."""
    if before is None:
        return {"is_causal": True}
    return {"is_causal": False, "attn_mask": _mask(x, rows, before)[None]}


def _mask(x: PackedAttentionForward, rows: slice, before: Tensor) -> Tensor:
    """Compute what is added to logits: [1, Q, K], or with biases [H, Q, K]."""
    if x.bias is None:
        return torch.where(before >= 0, 0.0, -torch.inf).to(x.q.dtype)[None]
    return added_by_distance(x.bias[rows], before)


def _heads(x: PackedAttentionForward, y: Tensor, rows: slice) -> Tensor:
    """View rows of ``y`` as [1, H, length, D], repeated for each head, padded to one width."""
    dim = max(x.q.shape[2], x.v.shape[2])
    y = y[rows] if y.shape[2] == dim else pad(y[rows], (0, dim - y.shape[2]))
    return y.transpose(0, 1)[None].repeat_interleave(x.q.shape[1] // y.shape[1], 1)
