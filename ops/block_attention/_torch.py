"""Implementation "torch": dense products of some queries and all that they may see, masked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.block_attention.op import BlockAttention

# Queries per product: bounds the logits to [Hq, _QUERIES, seq_len].
_QUERIES = 128


def block_attention(x: BlockAttention) -> Tensor:
    """Launch ``torch_hybrid::block_attention``."""
    q, (new, kv) = x.q, x.by_head()
    page_size = kv.shape[2]
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    slots = x.slot_mapping[: offsets[-1]].long()
    for plane, rows in zip(kv, new, strict=True):
        plane.view(-1, *rows.shape[1:])[slots] = rows[: offsets[-1]]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _QUERIES):
            end = min(begin + _QUERIES, offsets[n + 1])
            first = length - offsets[n + 1] + begin
            num_keys = first + end - begin
            pages = x.page_table[n, : -(-num_keys // page_size)].long()
            seen = kv[:, pages].flatten(1, 2)[:, :num_keys].transpose(1, 2)
            hidden = _hidden(x.blocks[begin:end], first, num_keys, x.block_size)
            out[begin:end] = _attend(q[begin:end], seen[0], seen[-1], hidden, x.scale)
    return out


def _hidden(blocks: Tensor, first: int, num_keys: int, block_size: int) -> Tensor:
    """Find the keys that queries at ``first``, ``first + 1``, ... do not see: [t, num_keys]."""
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
    """Attend with queries [t, Hq, D] to keys and values [Hkv, n, D]: [t, Hq, D]."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    folded = q.to(wide).view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    logits = scale * (folded.flatten(1, 2) @ keys.to(wide).transpose(1, 2))
    logits = logits.view(num_kv_heads, -1, num_queries, num_keys).masked_fill(hidden, -math.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)  # of a query that sees nothing
    out = (weights.flatten(1, 2) @ values.to(wide)).view(num_kv_heads, -1, num_queries, head_dim)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_q_heads, head_dim).to(q.dtype)
