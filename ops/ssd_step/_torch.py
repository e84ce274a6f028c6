"""Both steps in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_lengths, convolve
from torch_hybrid.ops.pointwise import silu, softplus
from torch_hybrid.ops.ragged_chunks import initial_states, live_sequences, store_states
from torch_hybrid.ops.ssd_step.by_steps import verify_by_ssd_steps


def ssd_step(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """All sequences that have a token together."""
    seqs = live_sequences(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=xBC.shape[0],
        num_slots=state.shape[0],
    )
    if seqs.max_length > 1:
        check_lengths(cu_seqlens)
    token = seqs.starts
    num_heads, v_dim, k_dim = state.shape[1:]
    x_size = num_heads * v_dim
    group_size = (xBC.shape[1] - x_size) // 2

    past = conv_state[seqs.initial].where((seqs.initial > 0)[:, None, None], 0.0)
    window = torch.cat([past, xBC[token][:, None]], 1)
    is_stored = seqs.slots > 0
    conv_state[seqs.slots[is_stored]] = window[is_stored, 1:]
    mixed = convolve(window, conv_weight, conv_bias, activation).float()
    x, B, C = mixed.split([x_size, group_size, group_size], 1)
    x = x.unflatten(1, (num_heads, v_dim))
    B, C = (part.unflatten(1, (-1, k_dim)) for part in (B, C))
    B, C = (part.repeat_interleave(num_heads // part.shape[1], 1) for part in (B, C))

    step = softplus(dt[token].float() + dt_bias.float()).clamp(dt_min, dt_max)
    decay = (step * -A_log.float().exp()).exp()
    S = initial_states(state, seqs).mul_(decay[..., None, None])
    S.add_((step[..., None] * x)[..., None] * B[..., None, :])
    o = (S @ C[..., None])[..., 0] + D.float()[:, None] * x
    store_states(state, seqs, S)

    out = xBC.new_zeros(xBC.shape[0], x_size)
    y = o.flatten(1).to(xBC.dtype)
    if z is not None:
        y = _gated(y, z[token], norm_weight, norm_before_gate, norm_groups, norm_eps)
    out[token] = y
    return out


def ssd_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """A token of all sequences at a time."""
    return verify_by_ssd_steps(ssd_step, *tensors, **options)  # type: ignore[arg-type]


def _gated(
    o: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """The gate before the norm, after it, or alone, rounded once at the end."""
    gate, y = silu(z.float()), o.float()
    if norm_weight is None or not norm_before_gate:
        y = y * gate
    if norm_weight is not None:
        parts = y.unflatten(1, (norm_groups, -1))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm_eps)
        y = norm_weight.float() * normed.flatten(1)
        y = y * gate if norm_before_gate else y
    return y.to(o.dtype)
