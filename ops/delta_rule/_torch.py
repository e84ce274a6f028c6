"""Delta rules in vectorised torch, whatever their decay: of a head, or of each of its channels.

Here ``g [T, HV, 1 or K]`` is the natural-log decay, with one entry per channel of K or one for
all. All other arguments are those of the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.ragged_chunks import (
    Chunks,
    chunk_table,
    initial_states,
    live_sequences,
    store_states,
)

# (q, k, g), each [X, HV, C, .], to the products x_i . k_j, decayed from token j to token i: for
# x = k where i > j, and for x = q where i >= j; [X, HV, C, C], 0 elsewhere.
DecayedProducts = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def l2_normalize(x: Tensor) -> Tensor:
    """Scale the last dimension to unit length, as the models do: 1e-6 is added to the square."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def sum_after(g: Tensor) -> Tensor:
    """Sum of the rows of ``g [..., C, K]`` after each row; no differences, so -inf may occur."""
    return pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def recurrent_delta_rule(
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
    """Step all sequences together, the longest first, so that those left are a leading slice."""
    seqs = live_sequences(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=v.shape[0],
        num_slots=state.shape[0],
    )
    S = initial_states(state, seqs)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for step in range(seqs.max_length):
        num_left = int((seqs.lengths > step).sum())
        token = seqs.starts[:num_left] + step
        q_t, k_t = _prepare_qk(q[token], k[token], v.shape[1], scale, qk_l2norm)
        S_t = S[:num_left].mul_(g[token].exp()[..., None, :])
        u = beta[token][..., None] * (v[token].float() - (S_t @ k_t[..., None])[..., 0])
        S_t.add_(u[..., None] * k_t[..., None, :])
        out[token] = (S_t @ q_t[..., None])[..., 0].to(out.dtype)
    store_states(state, seqs, S)
    return out


def chunk_delta_rule(
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
    decayed_products: DecayedProducts,
) -> Tensor:
    """Compute what lies inside chunks for all of them at once, then scan the states over them."""
    seqs = live_sequences(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=v.shape[0],
        num_slots=state.shape[0],
    )
    S = initial_states(state, seqs)
    chunks = chunk_table(seqs, chunk_size)
    parts = _inside_chunks(q, k, v, g, beta, chunks, scale, qk_l2norm, decayed_products)
    o = torch.empty_like(parts.u)
    for step in range(-(-seqs.max_length // chunk_size)):
        num_left = int((seqs.lengths > step * chunk_size).sum())
        c = chunks.first[:num_left] + step
        S_0 = S[:num_left]
        v_new = parts.u[c] - parts.w[c] @ S_0.mT
        o[c] = parts.q_decayed[c] @ S_0.mT + parts.attention[c] @ v_new
        S_0.mul_(parts.decay[c]).add_(v_new.mT @ parts.k_decayed[c])
    store_states(state, seqs, S)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    out[chunks.token[chunks.is_real]] = o.transpose(1, 2)[chunks.is_real].to(out.dtype)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkParts:
    """Per chunk and value head, all that does not depend on the state at its start."""

    u: Tensor
    w: Tensor
    q_decayed: Tensor
    k_decayed: Tensor
    attention: Tensor
    decay: Tensor


def _prepare_qk(
    q: Tensor, k: Tensor, num_v_heads: int, scale: float, qk_l2norm: bool
) -> tuple[Tensor, Tensor]:
    """Normalise and scale in float32, then give each value head its key head (dim -2)."""
    q, k = q.float(), k.float()
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    group = num_v_heads // k.shape[-2]
    return (q * scale).repeat_interleave(group, dim=-2), k.repeat_interleave(group, dim=-2)


def _inside_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Chunks,
    scale: float,
    qk_l2norm: bool,
    decayed_products: DecayedProducts,
) -> _ChunkParts:
    """Solve each chunk's triangular system for the values and for the keys that read the state.

    Rows past the end of a sequence have beta 0 and g 0: they change neither state nor outputs.
    """
    token, is_real = chunks.token, chunks.is_real[..., None, None]
    q_c, k_c = _prepare_qk(q[token], k[token], v.shape[1], scale, qk_l2norm)
    beta_c, g_c = (
        torch.where(is_real, x[token], 0.0).transpose(1, 2) for x in (beta[..., None], g)
    )
    q_c, k_c, v_c = (x.transpose(1, 2) for x in (q_c, k_c, v[token].float()))
    kk, attention = decayed_products(q_c, k_c, g_c)
    e_G = g_c.cumsum(-2).exp()
    u, w = (
        torch.linalg.solve_triangular(beta_c * kk, beta_c * x, upper=False, unitriangular=True)
        for x in (v_c, k_c * e_G)
    )
    return _ChunkParts(
        u=u,
        w=w,
        q_decayed=q_c * e_G,
        k_decayed=k_c * sum_after(g_c).exp(),
        attention=attention,
        decay=e_G[:, :, -1:, :],
    )
