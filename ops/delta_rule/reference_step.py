"""Step of both rules, which their references share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule.op_step import DeltaStep
from torch_hybrid.ops.delta_rule.reference import delta_rule_step
from torch_hybrid.ops.delta_rule.unit_rows import l2_normalize


def work_dtype(x: DeltaStep) -> torch.dtype:
    """Choose float32, or float64 when ``qkv`` is float64."""
    return torch.promote_types(x.qkv.dtype, torch.float32)


def step_reference(
    x: DeltaStep, g: Tensor, beta: Tensor, gate: Callable[[Tensor, Tensor], Tensor], norm_eps: float
) -> Tensor:
    """Convolve, advance and norm by log decays ``g``, step sizes and what gates normed outputs."""
    dtype, work = x.qkv.dtype, work_dtype(x)
    num_heads, v_dim, k_dim = x.state.shape[1:]
    out = torch.zeros_like(x.z, memory_format=torch.contiguous_format)
    for (t, *_), initial, slot in x.each_sequence():
        past = x.conv_state[initial] if initial else torch.zeros_like(x.conv_state[0])
        S = x.state[initial].to(work) if initial else torch.zeros_like(x.state[0], dtype=work)

        window = torch.cat([past, x.qkv[t : t + 1]])
        y = (window.to(work) * x.conv_weight.to(work).T).sum(0)
        y = y if x.conv_bias is None else y + x.conv_bias.to(work)
        y = (F.silu(y) if x.activation == "silu" else y).to(dtype).to(work)

        q, k, v = y.split(x.widths)
        q, k = (l2_normalize(part.view(-1, k_dim)) for part in (q, k))
        q, k = (part.repeat_interleave(num_heads // len(part), dim=0) for part in (q, k))
        S, o = delta_rule_step(S, q * x.scale, k, v.view(-1, v_dim), g[t], beta[t])
        o = o.to(dtype).to(work)

        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm_eps)
        out[t] = gate(normed, x.z[t].to(work).view_as(normed)).to(dtype).flatten()
        if slot:
            x.conv_state[slot], x.state[slot] = window[1:], S
    return out
