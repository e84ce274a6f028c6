"""Implementation "composed" of the mixers of a scalar decay: an op for the convolution and one for
the recurrence, with compiled code before, between and after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.causal_conv1d.op import causal_conv1d
from torch_hybrid.ops.composed import first_parts, without_padding
from torch_hybrid.ops.replay import Segments
from torch_hybrid.ops.ssd.gated_norm import gate_with_norm, norm, norm_and_gate
from torch_hybrid.ops.ssd.op import ssd
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep
from torch_hybrid.ops.verify import replayed, verify_by_replay


def mamba2(x: SsdStep) -> Tensor:
    """Launch ``torch_hybrid::ssd_step`` by its parts."""
    num_heads, v_dim, k_dim = x.state.shape[1:]
    parts = x.parts or first_parts(x.xBC, "ssd", "causal_conv1d")
    if x.records is not None:
        return verify_by_replay(mamba2, x, parts.replay)
    mixed = causal_conv1d(
        x.xBC,
        x.conv_weight,
        x.conv_bias,
        x.conv_state,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        activation=x.activation,
        impl=parts.impl("causal_conv1d"),
    )
    num_tokens, group_width = x.xBC.shape[0], (x.xBC.shape[1] - x.inner) // 2
    v, k, q = mixed.split([x.inner, group_width, group_width], dim=-1)
    dt = F.softplus(x.dt.float() + x.dt_bias.float()).clamp(x.dt_min, x.dt_max)
    o = ssd(
        q.view(num_tokens, group_width // k_dim, k_dim),
        k.view(num_tokens, group_width // k_dim, k_dim),
        v.view(num_tokens, num_heads, v_dim),
        dt * -x.A_log.float().exp(),
        dt,
        x.D.float(),
        x.state,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        scale=1.0,
        impl=parts.impl("ssd"),
    ).flatten(1)
    if x.z is None:
        return o
    out = gate_with_norm(
        o,
        x.z,
        x.norm_weight,
        norm_before_gate=x.norm_before_gate,
        num_groups=x.norm_groups,
        eps=x.norm_eps,
    )
    return out if x.parts else without_padding(out, x.cu_seqlens)


def lightning(x: LightningStep) -> Tensor:
    """Launch ``torch_hybrid::lightning_step`` by its parts; records are k and v of the rule."""
    num_heads = x.state.shape[1]
    parts = x.parts or first_parts(x.qkv, "ssd")
    impl = parts.impl("ssd")

    def attend(
        advancing: Sequence[Tensor], reading: Sequence[Tensor], at: LightningStep | Segments
    ) -> Tensor:
        (k, v), (q,) = advancing, reading
        g = -x.slopes.expand(q.shape[0], num_heads)
        index = (at.cu_seqlens, at.initial_indices, at.state_indices)
        return ssd(q, k, v, g, None, None, x.state, *index, scale=x.scale, impl=impl)

    q, k, v = _prepared(x)
    if x.records is None:
        o = attend([k, v], [q], x)
    else:
        o = replayed(attend, [k, v], [q], x, parts.replay)
    o = o.flatten(1) if x.q_norm_weight is not None else o.flatten(1).to(x.qkv.dtype)
    if x.gate is None or x.norm_weight is None:
        return o.float()
    out = norm_and_gate(o, x.gate, x.norm_weight, num_groups=x.norm_groups, eps=x.norm_eps)
    return out if x.parts else without_padding(out, x.cu_seqlens)


def _prepared(x: LightningStep) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k and v [T, H, D] as the recurrence takes them."""
    qkv = F.silu(x.qkv) if x.activation == "silu" else x.qkv
    q, k, v = qkv.unflatten(-1, (3, x.state.shape[1], x.state.shape[3])).unbind(1)
    if x.q_norm_weight is not None and x.k_norm_weight is not None:
        q, k = norm(q, x.q_norm_weight, x.norm_eps), norm(k, x.k_norm_weight, x.norm_eps)
        v = v.float()
    if x.cos is not None and x.sin is not None:
        q, k, v = q.float(), k.float(), v.float()
        q, k = _rotate(q, x.cos, x.sin), _rotate(k, x.cos, x.sin)
    return q, k, v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D]: dim i of the first R with dim i + R / 2 (NeoX)."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
