"""Implementation "torch": for machines without a compiler, and as a baseline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_lengths, convolve
from torch_hybrid.ops.pointwise import silu, softplus
from torch_hybrid.ops.ragged_chunks import initial_states, sequences_of, store_states
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep
from torch_hybrid.ops.verify import verify_by_calls


def ssd_step(x: SsdStep) -> Tensor:
    """Launch ``torch_hybrid::ssd_step``: a token of all sequences at a time."""
    if x.records is not None:
        return verify_by_ssd_steps(ssd_step, x)
    seqs = sequences_of(x)
    if seqs.max_length > 1:
        check_lengths(x.cu_seqlens)
    token = seqs.starts
    num_heads, v_dim, k_dim = x.state.shape[1:]
    group_size = (x.xBC.shape[1] - x.inner) // 2

    past = x.conv_state[seqs.initial].where((seqs.initial > 0)[:, None, None], 0.0)
    window = torch.cat([past, x.xBC[token][:, None]], 1)
    is_stored = seqs.slots > 0
    x.conv_state[seqs.slots[is_stored]] = window[is_stored, 1:]
    mixed = convolve(window, x.conv_weight, x.conv_bias, x.activation).float()
    inputs, B, C = mixed.split([x.inner, group_size, group_size], 1)
    inputs = inputs.unflatten(1, (num_heads, v_dim))
    B, C = (part.unflatten(1, (-1, k_dim)) for part in (B, C))
    B, C = (part.repeat_interleave(num_heads // part.shape[1], 1) for part in (B, C))

    step = softplus(x.dt[token].float() + x.dt_bias.float()).clamp(x.dt_min, x.dt_max)
    decay = (step * -x.A_log.float().exp()).exp()
    S = initial_states(x.state, seqs).mul_(decay[..., None, None])
    S.add_((step[..., None] * inputs)[..., None] * B[..., None, :])
    o = (S @ C[..., None])[..., 0] + x.D.float()[:, None] * inputs
    store_states(x.state, seqs, S)

    out = x.xBC.new_zeros(x.xBC.shape[0], x.inner)
    y = o.flatten(1).to(x.xBC.dtype)
    if x.z is not None:
        y = _gated(y, x.z[token], x)
    out[token] = y
    return out


def verify_by_ssd_steps(step: Callable[[SsdStep], Tensor], x: SsdStep) -> Tensor:
    """Verify drafts by a launcher of the decode step."""
    return verify_by_calls(step, x, x.xBC.new_zeros(x.xBC.shape[0], x.inner))


def _gated(o: Tensor, z: Tensor, x: SsdStep) -> Tensor:
    """Gate before the norm, after it, or alone, rounding once at the end."""
    gate, y = silu(z.float()), o.float()
    if x.norm_weight is None or not x.norm_before_gate:
        y = y * gate
    if x.norm_weight is not None:
        parts = y.unflatten(1, (x.norm_groups, -1))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + x.norm_eps)
        y = x.norm_weight.float() * normed.flatten(1)
        y = y * gate if x.norm_before_gate else y
    return y.to(o.dtype)
