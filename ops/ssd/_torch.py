"""Both execution forms in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.ops.ragged_chunks import (
    FULL_DECAY,
    Chunks,
    chunk_table,
    initial_states,
    sequences_of,
    store_states,
)
from torch_hybrid.ops.ssd.op import Ssd


def recurrent_ssd(x: Ssd) -> Tensor:
    """Step all sequences together, the longest first, so that those left are a leading slice."""
    q, k, v, dt, D = x.q, x.k, x.v, x.dt, x.D
    seqs = sequences_of(x)
    S = initial_states(x.state, seqs)
    group = v.shape[1] // k.shape[1]
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for step in range(seqs.max_length):
        num_left = int((seqs.lengths > step).sum())
        token = seqs.starts[:num_left] + step
        q_t, k_t = (y[token].float().repeat_interleave(group, dim=1) for y in (q, k))
        v_t = v[token].float()
        u = v_t if dt is None else dt[token][..., None] * v_t
        S_t = S[:num_left].mul_(x.g[token].exp()[..., None, None])
        S_t.add_(u[..., None] * k_t[..., None, :])
        o = x.scale * (S_t @ q_t[..., None])[..., 0]
        out[token] = (o if D is None else o + D[:, None] * v_t).to(out.dtype)
    store_states(x.state, seqs, S)
    return out


def chunk_ssd(x: Ssd) -> Tensor:
    """Compute what lies inside chunks for all of them at once, then scan the states over them."""
    seqs, chunk_size = sequences_of(x), x.chunk_size
    S = initial_states(x.state, seqs)
    chunks = chunk_table(seqs, chunk_size)
    parts = _inside_chunks(x, chunks)
    o = parts.o
    for step in range(-(-seqs.max_length // chunk_size)):
        num_left = int((seqs.lengths > step * chunk_size).sum())
        c = chunks.first[:num_left] + step
        S_0 = S[:num_left]
        o[c] += parts.q_decay[c] * (parts.q[c] @ S_0.unflatten(1, parts.by_group).mT).flatten(1, 2)
        S_0.mul_(parts.decay[c]).add_(parts.state[c])
    store_states(x.state, seqs, S)
    out = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    out[chunks.token[chunks.is_real]] = o.transpose(1, 2)[chunks.is_real].to(out.dtype)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkParts:
    """Per chunk, all that does not depend on the state at its start.

    Legend: X chunks, C tokens in each, G groups, H heads, K and V head dims.
    """

    by_group: tuple[int, int]  # of the heads: G, H // G
    q: Tensor  # [X, G, 1, C, K]
    q_decay: Tensor  # [X, H, C, 1] since the start of the chunk
    o: Tensor  # [X, H, C, V] what tokens read from their own chunk
    state: Tensor  # [X, H, V, K] what the chunk adds
    decay: Tensor  # [X, H, 1, 1] of the whole chunk


def _inside_chunks(x: Ssd, chunks: Chunks) -> _ChunkParts:
    """Compute them. Rows past the end of a sequence have v 0 and g 0: they change nothing."""
    k, v, dt, D = x.k, x.v, x.dt, x.D
    work = torch.promote_types(v.dtype, torch.float32)
    token, is_real = chunks.token, chunks.is_real[..., None]
    by_group = (k.shape[1], v.shape[1] // k.shape[1])
    q_c, k_c = (y[token].to(work).transpose(1, 2).unsqueeze(2) for y in (x.q, k))
    q_c = x.scale * q_c
    v_c = (v[token].to(work) * is_real[..., None]).transpose(1, 2)
    u = v_c if dt is None else dt[token].transpose(1, 2)[..., None] * v_c
    # In float64: a difference of two large sums must not lose a small decay between them.
    G = (x.g[token].clamp(min=FULL_DECAY) * is_real).transpose(1, 2).double().cumsum(-1)
    pair_decay = (G[..., :, None] - G[..., None, :]).to(work).tril().exp().tril()
    attention = (q_c @ k_c.mT) * pair_decay.unflatten(1, by_group)
    o = attention.flatten(1, 2) @ u
    left = (G[..., -1:] - G).to(work).exp()[..., None]
    return _ChunkParts(
        by_group=by_group,
        q=q_c,
        q_decay=G.to(work).exp()[..., None],
        o=o if D is None else o.addcmul_(D[:, None, None], v_c),
        state=((left * u).unflatten(1, by_group).mT @ k_c).flatten(1, 2),
        decay=G[..., -1:, None].to(work).exp(),
    )
