"""Both execution forms in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule._torch import chunk_delta_rule, recurrent_delta_rule, sum_after

recurrent_kimi_delta_attention = recurrent_delta_rule


def chunk_kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
) -> Tensor:
    """Solve all chunks at once, then scan the states over them."""
    return chunk_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        qk_l2norm=qk_l2norm,
        chunk_size=chunk_size,
        decayed_products=_decayed_products,
    )


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Halve the chunk again and again: late rows meet early rows at the middle of a block.

    Both sides carry the decay between their token and the middle, never more than 1.
    """
    size = k.shape[-2]
    rows = torch.stack([k, q], dim=2)
    products = rows.new_zeros(*rows.shape[:-1], size)
    half = size // 2
    while half:
        blocks = (size // (2 * half), 2, half)
        (k_b, rows_b, g_b) = (x.unflatten(-2, blocks) for x in (k, rows, g))
        early = k_b[..., 0, :, :] * sum_after(g_b[..., 0, :, :]).exp()
        late = rows_b[..., 1, :, :] * g_b[..., 1, :, :].cumsum(-2).exp()[:, :, None]
        # [X, H, 2, half, half, block]: the entries between the two halves of the same block
        target = products.unflatten(-1, blocks).unflatten(3, blocks)[..., 1, :, :, 0, :]
        target.diagonal(dim1=3, dim2=5).copy_((late @ early[:, :, None].mT).movedim(3, -1))
        half //= 2
    kk, qk = products.unbind(2)
    qk.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return kk, qk
