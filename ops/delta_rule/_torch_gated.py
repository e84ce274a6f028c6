"""Both execution forms in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.delta_rule._torch import chunk_delta_rule, recurrent_delta_rule
from torch_hybrid.ops.ragged_chunks import FULL_DECAY


def recurrent_gated_delta_rule(
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
) -> Tensor:
    """Step all sequences together, with one decay for all channels of a head."""
    return recurrent_delta_rule(
        q,
        k,
        v,
        g[..., None],
        beta,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        scale=scale,
        qk_l2norm=qk_l2norm,
    )


def chunk_gated_delta_rule(
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
        g[..., None],
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
    """Products of whole chunks, each entry decayed by what lies between its two tokens."""
    # In float64: a difference of two large sums must not lose a small decay between them.
    G = g[..., 0].clamp(min=FULL_DECAY).double().cumsum(-1)
    D = (G[..., :, None] - G[..., None, :]).float().tril().exp().tril()
    return (k @ k.mT * D).tril(-1), q @ k.mT * D
