"""The oracle: plain softmax attention, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.block_attention.op import BlockAttention


def block_attention(x: BlockAttention) -> Tensor:
    """Compute the op one query at a time."""
    q, blocks, block_size, (new, kv) = x.q, x.blocks, x.block_size, x.by_head()
    page_size, num_kv_heads = kv.shape[2:4]
    group = q.shape[1] // num_kv_heads
    work = torch.promote_types(q.dtype, torch.float32)
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    out = q.new_zeros(q.shape)

    for t in range(offsets[-1]):
        page, offset = divmod(int(x.slot_mapping[t]), page_size)
        kv[:, page, offset] = torch.stack([rows[t] for rows in new])

    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            position = length - offsets[n + 1] + t
            chosen = blocks[t][blocks[t] >= 0].tolist()
            visible = [b * block_size + i for b in chosen for i in range(block_size)]
            visible += range((position + 1) // block_size * block_size, position + 1)
            if not visible:
                continue
            at = torch.tensor(visible, dtype=torch.int64, device=q.device)
            shared = kv[:, x.page_table[n, at // page_size].long(), at % page_size].to(work)
            shared = shared.repeat_interleave(group, dim=2)
            keys, values = shared[0], shared[-1]
            logits = x.scale * torch.einsum("lhd,hd->hl", keys, q[t].to(work))
            out[t] = torch.einsum("hl,lhd->hd", logits.softmax(-1), values).to(q.dtype)
    return out
