"""The decode step in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule import l2_normalize
from torch_hybrid.ops.gated_delta_step.validate import check_lengths
from torch_hybrid.ops.ragged_chunks import initial_states, live_sequences, store_states


def gated_delta_step(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
) -> Tensor:
    """All sequences that have a token together."""
    seqs = live_sequences(cu_seqlens, initial_indices, state_indices)
    if seqs.max_length > 1:
        check_lengths(cu_seqlens)
    token = seqs.starts
    num_heads, v_dim, k_dim = state.shape[1:]
    v_size = num_heads * v_dim
    k_size = (qkv.shape[1] - v_size) // 2

    past = conv_state[seqs.initial].where((seqs.initial > 0)[:, None, None], 0.0)
    window = torch.cat([past, qkv[token][:, None]], 1)
    is_stored = seqs.slots > 0
    conv_state[seqs.slots[is_stored]] = window[is_stored, 1:]
    mixed = _convolve(window, conv_weight, conv_bias, activation)
    q, k, v = mixed.float().split([k_size, k_size, v_size], 1)
    q, k = (l2_normalize(x.unflatten(1, (-1, k_dim))) for x in (q, k))
    group = num_heads // k.shape[1]
    q, k = (q * scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1)

    g = -A_log.float().exp() * F.softplus(a[token].float() + dt_bias.float())
    beta = b[token].float().sigmoid() * beta_scale
    S = initial_states(state, seqs).mul_(g.exp()[..., None, None])
    u = beta[..., None] * (v.unflatten(1, (num_heads, v_dim)) - (S @ k[..., None])[..., 0])
    S.add_(u[..., None] * k[..., None, :])
    o = (S @ q[..., None])[..., 0].to(z.dtype)
    store_states(state, seqs, S)

    out = torch.zeros_like(z, memory_format=torch.contiguous_format)
    gate = F.silu(z[token].float()).unflatten(1, (num_heads, v_dim))
    normed = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + norm_eps)
    out[token] = (norm_weight * normed.to(o.dtype) * gate).to(z.dtype).flatten(1)
    return out


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The last token of each window [N, W, C] -> [N, C], in its dtype."""
    y = torch.zeros_like(window[:, 0], dtype=torch.float32)
    for x, taps in zip(window.unbind(1), weight.T, strict=True):
        y.addcmul_(x.float(), taps.float())
    if bias is not None:
        y += bias.float()
    return (F.silu(y) if activation == "silu" else y).to(window.dtype)
