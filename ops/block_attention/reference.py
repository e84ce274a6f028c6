"""The oracle: plain softmax attention, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.block_attention.heads import by_head


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
    """[T, Hq, D]: see the op."""
    new, kv = by_head(k, v, kv)
    page_size, num_kv_heads = kv.shape[2:4]
    group = q.shape[1] // num_kv_heads
    work = torch.promote_types(q.dtype, torch.float32)
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    out = q.new_zeros(q.shape)

    for t in range(offsets[-1]):
        page, offset = divmod(int(slot_mapping[t]), page_size)
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
            shared = kv[:, page_table[n, at // page_size].long(), at % page_size].to(work)
            shared = shared.repeat_interleave(group, dim=2)
            keys, values = shared[0], shared[-1]
            logits = scale * torch.einsum("lhd,hd->hl", keys, q[t].to(work))
            out[t] = torch.einsum("hl,lhd->hd", logits.softmax(-1), values).to(q.dtype)
    return out
