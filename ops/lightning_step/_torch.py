"""The decode step in vectorised torch, as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.conv_step import check_lengths
from torch_hybrid.ops.ragged_chunks import initial_states, live_sequences, store_states


def lightning_step(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """All sequences that have a token together."""
    seqs = live_sequences(cu_seqlens, initial_indices, state_indices)
    if seqs.max_length > 1:
        check_lengths(cu_seqlens)
    token, dim = seqs.starts, state.shape[-1]
    x = qkv[token]
    x = F.silu(x) if activation == "silu" else x
    q, k, v = x.float().unflatten(1, (3, -1, dim)).unbind(1)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = _norm(q, q_norm_weight, norm_eps), _norm(k, k_norm_weight, norm_eps)
    if cos is not None and sin is not None:
        angles = cos[token, None], sin[token, None]
        q, k = _rotate(q, *angles), _rotate(k, *angles)
    S = initial_states(state, seqs).mul_(torch.exp(-slopes)[:, None, None])
    S.add_(v[..., :, None] * k[..., None, :])
    o = scale * (S @ q[..., None])[..., 0].flatten(1)
    o = o if q_norm_weight is not None else o.to(qkv.dtype).float()
    store_states(state, seqs, S)
    if gate is not None and norm_weight is not None:
        groups = norm_weight.unflatten(0, (norm_groups, -1))
        o = _norm(o.unflatten(1, (norm_groups, -1)), groups, norm_eps).flatten(1)
        o = o * gate[token].float().sigmoid()
    dtype = o.dtype if gate is None else qkv.dtype
    out = qkv.new_zeros(qkv.shape[0], o.shape[1], dtype=dtype)
    out[token] = o.to(dtype)
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.float() * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
