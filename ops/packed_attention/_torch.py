"""Attention within packed sequences by torch's flash kernel for a CPU, sequence by sequence."""

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
from torch_hybrid.ops.packed_attention.reference import seen_blocks

# Queries per call where blocks are picked: bounds a mask to [_QUERIES, length].
_QUERIES = 256
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention_forward(x: PackedAttentionForward) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps."""
    out, lse = (each.zero_() for each in empty_results(x))
    for rows, keys, seen in _parts(x):
        q, k, v = _heads(x, x.q, rows), _heads(x, x.k, keys), _heads(x, x.v, keys)
        o, sums = _FORWARD(q, k, v, 0.0, **seen, scale=x.scale)
        out[rows] = o[0].transpose(0, 1)[..., : x.v.shape[2]]
        lse[rows] = sums[0].T
    return out, lse


def packed_attention_backward(x: PackedAttentionBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k and v."""
    grads = tuple(each.zero_() for each in empty_gradients(x))
    for rows, keys, seen in _parts(x):
        dout, q, out = (_heads(x, y, rows) for y in (x.dout, x.q, x.out))
        k, v = (_heads(x, y, keys) for y in (x.k, x.v))
        lse = x.lse[rows].T.contiguous()[None]
        made = _BACKWARD(dout, q, k, v, out, lse, 0.0, **seen, scale=x.scale)
        for grad, padded, of in zip(grads, made, (rows, keys, keys), strict=True):
            of_heads = padded[0, ..., : grad.shape[2]].unflatten(0, (grad.shape[1], -1))
            grad[of] += of_heads.sum(1).transpose(0, 1)
    return grads


def _parts(x: PackedAttentionForward) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield rows of queries, the rows of keys that they read, and how the kernel is to mask these.

    A sequence longer than its window is cut into parts of as many queries; so are the queries of
    one that have more complete blocks than are picked.
    """
    for start, end in pairwise(x.cu_seqlens.tolist()):
        whole = min(end, start + _num_whole(x, end - start))
        if whole > start:
            yield slice(start, whole), slice(start, whole), {"is_causal": True}
        most = _QUERIES if x.window is None else x.window
        for first in range(whole, end, most):
            rows = slice(first, min(first + most, end))
            begin = start if x.window is None else max(start, first - most + 1)
            keys = slice(begin, rows.stop)
            row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=x.q.device)
            key = torch.arange(keys.start, keys.stop, dtype=torch.int64, device=x.q.device)
            sees = row[:, None] >= key
            if x.window is not None:
                sees &= row[:, None] - key < x.window
            if x.blocks is not None:
                of_key = (key - start) // x.block_size
                sees &= seen_blocks(x.blocks[rows], row - start, of_key, x.block_size)
            mask = torch.where(sees, 0.0, -torch.inf).to(x.q.dtype)
            yield rows, keys, {"is_causal": False, "attn_mask": mask}


def _num_whole(x: PackedAttentionForward, length: int) -> int:
    """Count the first tokens of a sequence that see all tokens before them."""
    if x.blocks is not None:
        return (x.blocks.shape[1] + 1) * x.block_size - 1
    return 0 if x.window is not None and x.window < length else length


def _heads(x: PackedAttentionForward, y: Tensor, rows: slice) -> Tensor:
    """View rows of ``y`` as [1, H, length, D], repeated for each head, padded to one width."""
    dim = max(x.q.shape[2], x.v.shape[2])
    y = y[rows] if y.shape[2] == dim else pad(y[rows], (0, dim - y.shape[2]))
    return y.transpose(0, 1)[None].repeat_interleave(x.q.shape[1] // y.shape[1], 1)
