"""Implementation "torch": dense products of some queries and all that they may see, masked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.block_attention.bounds import check_indices
from torch_hybrid.ops.block_attention.heads import by_head

# Queries per product: bounds the logits to [Hq, _QUERIES, seq_len].
_QUERIES = 128


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::block_attention``."""
    new, kv = by_head(k, v, kv)
    page_size = kv.shape[2]
    if q.device.type == "cpu":
        check_indices(
            blocks,
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=kv.shape[1],
            page_size=page_size,
            block_size=block_size,
        )
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    slots = slot_mapping[: offsets[-1]].long()
    for plane, rows in zip(kv, new, strict=True):
        plane.view(-1, *rows.shape[1:])[slots] = rows[: offsets[-1]]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _QUERIES):
            end = min(begin + _QUERIES, offsets[n + 1])
            first = length - offsets[n + 1] + begin
            num_keys = first + end - begin
            pages = page_table[n, : -(-num_keys // page_size)].long()
            seen = kv[:, pages].flatten(1, 2)[:, :num_keys].transpose(1, 2)
            hidden = _hidden(blocks[begin:end], first, num_keys, block_size)
            out[begin:end] = _attend(q[begin:end], seen[0], seen[-1], hidden, scale)
    return out


def _hidden(blocks: Tensor, first: int, num_keys: int, block_size: int) -> Tensor:
    """[t, num_keys]: the keys that queries at ``first``, ``first + 1``, ... do not see."""
    num_queries, num_blocks = blocks.shape[0], num_keys // block_size
    position = torch.arange(first, first + num_queries, dtype=torch.int64, device=blocks.device)
    position = position[:, None]
    key = torch.arange(num_keys, dtype=torch.int64, device=blocks.device)
    chosen = blocks.new_zeros((num_queries, num_blocks + 1), dtype=torch.bool)
    chosen.scatter_(1, blocks.where(blocks >= 0, num_blocks).long(), True)
    chosen[:, num_blocks] = False  # where those that are none were put
    in_block = chosen[:, (key // block_size).clamp(max=num_blocks)]
    in_tail = (key >= (position + 1) // block_size * block_size) & (key <= position)
    return ~(in_block | in_tail)


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[t, Hq, D] of queries [t, Hq, D], keys and values [Hkv, n, D]."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    folded = q.to(wide).view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    logits = scale * (folded.flatten(1, 2) @ keys.to(wide).transpose(1, 2))
    logits = logits.view(num_kv_heads, -1, num_queries, num_keys).masked_fill(hidden, -math.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)  # of a query that sees nothing
    out = (weights.flatten(1, 2) @ values.to(wide)).view(num_kv_heads, -1, num_queries, head_dim)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_q_heads, head_dim).to(q.dtype)
