"""Delta rules in vectorised torch, whatever their decay: of a head, or of each of its channels.

For machines without a compiler, and as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.delta_rule.op import DeltaRule
from torch_hybrid.ops.delta_rule.unit_rows import l2_normalize
from torch_hybrid.ops.ragged_chunks import (
    FULL_DECAY,
    Chunks,
    chunk_table,
    initial_states,
    sequences_of,
    store_states,
)


def sum_after(g: Tensor) -> Tensor:
    """Sum of the rows of ``g [..., C, K]`` after each row; no differences, so -inf may occur."""
    return pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def recurrent_delta_rule(x: DeltaRule) -> Tensor:
    """Step all sequences together, the longest first, so that those left are a leading slice."""
    seqs, state, v, g = sequences_of(x), x.state, x.v, _decays(x)
    S = initial_states(state, seqs)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for step in range(seqs.max_length):
        num_left = int((seqs.lengths > step).sum())
        token = seqs.starts[:num_left] + step
        q_t, k_t = _prepare_qk(x, token)
        S_t = S[:num_left].mul_(g[token].exp()[..., None, :])
        u = x.beta[token][..., None] * (v[token].to(S.dtype) - (S_t @ k_t[..., None])[..., 0])
        S_t.add_(u[..., None] * k_t[..., None, :])
        out[token] = (S_t @ q_t[..., None])[..., 0].to(out.dtype)
    store_states(state, seqs, S)
    return out


def chunk_delta_rule(x: DeltaRule) -> Tensor:
    """Compute what lies inside chunks for all of them at once, then scan the states over them."""
    seqs, state, v, chunk_size = sequences_of(x), x.state, x.v, x.chunk_size
    S = initial_states(state, seqs)
    chunks = chunk_table(seqs, chunk_size)
    parts = _inside_chunks(x, chunks)
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


def _decays(x: DeltaRule) -> Tensor:
    """Give the decays [T, HV, K], or [T, HV, 1] of all channels of a head."""
    return x.g if x.by_channel else x.g[..., None]


def _prepare_qk(x: DeltaRule, token: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise and scale in float32, then give each value head its key head (dim -2)."""
    work = torch.promote_types(x.q.dtype, torch.float32)
    q, k = x.q[token].to(work), x.k[token].to(work)
    if x.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    group = x.v.shape[1] // k.shape[-2]
    return (q * x.scale).repeat_interleave(group, dim=-2), k.repeat_interleave(group, dim=-2)


def _inside_chunks(x: DeltaRule, chunks: Chunks) -> _ChunkParts:
    """Solve each chunk's triangular system for the values and for the keys that read the state.

    Rows past the end of a sequence have beta 0 and g 0: they change neither state nor outputs.
    """
    token, is_real = chunks.token, chunks.is_real[..., None, None]
    q_c, k_c = _prepare_qk(x, token)
    beta_c, g_c = (
        torch.where(is_real, rows[token], 0.0).transpose(1, 2)
        for rows in (x.beta[..., None], _decays(x))
    )
    q_c, k_c, v_c = (rows.transpose(1, 2) for rows in (q_c, k_c, x.v[token].to(q_c.dtype)))
    decayed_products = _products_by_channel if x.by_channel else _products_by_head
    kk, attention = decayed_products(q_c, k_c, g_c)
    e_G = g_c.cumsum(-2).exp()
    u, w = (
        torch.linalg.solve_triangular(beta_c * kk, beta_c * rows, upper=False, unitriangular=True)
        for rows in (v_c, k_c * e_G)
    )
    return _ChunkParts(
        u=u,
        w=w,
        q_decayed=q_c * e_G,
        k_decayed=k_c * sum_after(g_c).exp(),
        attention=attention,
        decay=e_G[:, :, -1:, :],
    )


# Both take (q, k, g), each [X, HV, C, .], to the products x_i . k_j, decayed from token j to token
# i: for x = k where i > j, and for x = q where i >= j; [X, HV, C, C], 0 elsewhere.


def _products_by_head(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply whole chunks, and decay each entry by what lies between its two tokens."""
    # In float64: a difference of two large sums must not lose a small decay between them.
    G = g[..., 0].clamp(min=FULL_DECAY).double().cumsum(-1)
    D = (G[..., :, None] - G[..., None, :]).to(k.dtype).tril().exp().tril()
    return (k @ k.mT * D).tril(-1), q @ k.mT * D


def _products_by_channel(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
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
