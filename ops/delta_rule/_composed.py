"""Implementation "composed" of the mixers of delta rules: an op for the convolution and one for the
rule, with compiled code between and after them. "torch" is the same with both ops in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.causal_conv1d.op import causal_conv1d
from torch_hybrid.ops.composed import Parts, first_parts, run_in_torch, without_padding
from torch_hybrid.ops.delta_rule.op import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep
from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep
from torch_hybrid.ops.verify import verify_by_replay

_GATED = ("gated_delta_rule", "causal_conv1d")
_KIMI = ("kimi_delta_attention", "causal_conv1d")


def gated_delta_in_torch(x: GatedDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::gated_delta_step`` by its parts in torch."""
    return run_in_torch(gated_delta, x, *_GATED)


def kimi_delta_in_torch(x: KimiDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::kimi_delta_step`` by its parts in torch."""
    return run_in_torch(kimi_delta, x, *_KIMI)


def gated_delta(x: GatedDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::gated_delta_step`` by its parts."""
    parts = x.parts or first_parts(x.qkv, *_GATED)
    if x.records is not None:
        return verify_by_replay(gated_delta, x, parts.replay)
    q, k, v = _convolved(x, parts)
    g = -x.A_log.float().exp() * F.softplus(x.a.float() + x.dt_bias.float())
    beta = x.b.float().sigmoid() * x.beta_scale
    o = _apply(gated_delta_rule, (q, k, v, g, beta), x, parts)
    z = x.z.view_as(o)
    out = gated_norm(o, z, x.norm_weight, gate=x.gate, eps=x.norm_eps).flatten(1)
    return out if x.parts else without_padding(out, x.cu_seqlens)


def kimi_delta(x: KimiDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::kimi_delta_step`` by its parts."""
    parts = x.parts or first_parts(x.qkv, *_KIMI)
    if x.records is not None:
        return verify_by_replay(kimi_delta, x, parts.replay)
    q, k, v = _convolved(x, parts)
    g = kimi_log_decay(x.a, x.A_log, x.dt_bias, x.gate_lower_bound)
    o = _apply(kimi_delta_attention, (q, k, v, g, x.b.float().sigmoid()), x, parts)
    z = x.z.unflatten(-1, o.shape[1:])
    out = kimi_gated_norm(o, z, x.norm_weight, eps=x.norm_eps).flatten(1)
    return out if x.parts else without_padding(out, x.cu_seqlens)


def kimi_log_decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, gate_lower_bound: float | None
) -> Tensor:
    """Compute each channel's float32 log decay [T, H, K] from a [T, H K], bounded or not."""
    rate = A_log.float().exp()[:, None]
    step = a.float().unflatten(-1, dt_bias.shape) + dt_bias.float()
    if gate_lower_bound is None:
        return -rate * F.softplus(step)
    return gate_lower_bound * torch.sigmoid(rate * step)


def _apply(
    rule: Callable[..., Tensor], inputs: tuple[Tensor, ...], x: DeltaStep, parts: Parts
) -> Tensor:
    """Apply the rule to q, k, v, decays and step sizes -> [T, HV, V]."""
    options = {"scale": x.scale, "qk_l2norm": True, "impl": parts.impl(rule.__name__)}
    index = (x.cu_seqlens, x.initial_indices, x.state_indices)
    return rule(*inputs, x.state, *index, **options, **parts.given)


def _convolved(x: DeltaStep, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve -> q, k [T, H, K] and v [T, HV, V]."""
    mixed = causal_conv1d(
        x.qkv,
        x.conv_weight,
        x.conv_bias,
        x.conv_state,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        activation=x.activation,
        impl=parts.impl("causal_conv1d"),
    )
    num_tokens, (num_v_heads, v_dim, k_dim) = x.qkv.shape[0], x.state.shape[1:]
    widths = x.widths
    q, k, v = mixed.split(widths, dim=-1)
    num_k_heads = widths[0] // k_dim
    return (
        q.view(num_tokens, num_k_heads, k_dim),
        k.view(num_tokens, num_k_heads, k_dim),
        v.view(num_tokens, num_v_heads, v_dim),
    )


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, *, gate: str, eps: float) -> Tensor:
    """Normalise each head (RMSNorm), then gate it; the weight applies after the cast back."""
    o32 = o.float()
    normed = o32 * torch.rsqrt(o32.pow(2).mean(-1, keepdim=True) + eps)
    weighted = weight * normed.to(o.dtype)
    factor = F.silu(z.float()) if gate == "silu" else z.float().sigmoid()
    return (weighted * factor).to(o.dtype)


def kimi_gated_norm(o: Tensor, z: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise each head (RMSNorm), weigh and gate it, all in float32; one cast back."""
    o32 = o.float()
    normed = o32 * torch.rsqrt(o32.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * normed * z.float().sigmoid()).to(o.dtype)
