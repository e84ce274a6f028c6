"""Mixers of transformers that train: boundaries of packed sequences, and differentiable ops.

A twin is a class in front of a mixer's own. With a packing it computes by
``torch_hybrid.functional``; else the mixer's own forward runs, with caches of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from torch_hybrid.functional import causal_conv1d, gated_delta_rule, kimi_delta_attention, ssd
from torch_hybrid.packing import Packing

Submodule = Callable[..., Tensor]


class Projected(NamedTuple):
    """Inputs of a mixer's ops: qkv [T, C] before the convolution, the output gate [T, HV * V]."""

    qkv: Tensor
    g: Tensor  # [T, HV], or [T, H, K] of channels that decay on their own; natural log
    beta: Tensor  # [T, HV]
    gate: Tensor


class Twin(nn.Module):
    """Mixer whose subclasses know what their families compute."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]; ``packing`` is that of all B * T tokens."""
        if packing is None:
            own: Tensor = super().forward(hidden_states, *args, **options)
            return own
        return self.packed(hidden_states.flatten(0, 1), packing).view(hidden_states.shape)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Map tokens [T, D] to [T, D]."""
        raise NotImplementedError


class ShortConv(Twin):
    """Short convolution between two gates, as in LFM2 and LFM3."""

    conv: nn.Conv1d
    in_proj: Submodule
    out_proj: Submodule

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, -1)
        weight, bias = self.conv.weight.squeeze(1).to(x.dtype), self.conv.bias
        bias = None if bias is None else bias.to(x.dtype)
        x, _ = causal_conv1d(before * x, weight, bias, packing=packing, output_final_state=False)
        return self.out_proj(after * x)


class Mamba2(Twin):
    """State space duality behind a short convolution, as in Mamba2, Bamba and Granite 4."""

    A_log: Tensor
    D: Tensor
    activation: Literal["silu"]
    conv1d: nn.Conv1d
    conv_dim: int
    dt_bias: Tensor
    head_dim: int
    in_proj: Submodule
    intermediate_size: int
    norm: Submodule
    num_heads: int
    out_proj: Submodule
    ssm_state_size: int
    time_step_limit: tuple[float, float]

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        widths = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, xBC, dt = self.project(x).split(widths, -1)
        weight, bias = self.conv1d.weight.squeeze(1).to(xBC.dtype), self.conv1d.bias
        bias = None if bias is None else bias.to(xBC.dtype)
        xBC, _ = causal_conv1d(
            xBC, weight, bias, packing, activation=self.activation, output_final_state=False
        )
        group_width = (self.conv_dim - self.intermediate_size) // 2
        v, B, C = xBC.split([self.intermediate_size, group_width, group_width], -1)
        B, C = (_by_head(each, self.ssm_state_size) for each in (B, C))
        y, _ = ssd(
            *(_by_head(v, self.head_dim), dt, -_work(self.A_log).exp(), B, C),
            *(self.D, self.dt_bias, packing),
            dt_limit=self.time_step_limit,
            output_final_state=False,
        )
        return self.out_proj(self.gated(y.flatten(1), gate).to(x.dtype))

    def project(self, x: Tensor) -> Tensor:
        """Project tokens [T, D] to gates, inputs of the convolution, and steps."""
        return self.in_proj(x)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate outputs [T, H * P]."""
        return self.norm(y, gate)


class FalconH1Mamba2(Mamba2):
    """State space duality as in Falcon-H1: multipliers, and a norm that a model may lack."""

    mamba_rms_norm: bool
    mup_vector: Tensor
    ssm_in_multiplier: float

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x * self.ssm_in_multiplier) * self.mup_vector[0]

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.norm(y, gate) if self.mamba_rms_norm else y * silu(gate)


class DeltaRule(Twin):
    """Mixer of a delta rule; subclasses know how their families project tokens."""

    conv1d: nn.Conv1d

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        return self.mix(self.project(x), packing)

    def project(self, x: Tensor) -> Projected:
        """Project tokens [T, D]."""
        raise NotImplementedError

    def mix(self, x: Projected, packing: Packing) -> Tensor:
        """Run the ops of the mixer; return [T, D]."""
        raise NotImplementedError

    def convolved(self, qkv: Tensor, widths: list[int], packing: Packing) -> tuple[Tensor, ...]:
        """Convolve the channels, and split them by ``widths``."""
        weight = self.conv1d.weight.squeeze(1).to(qkv.dtype)
        qkv, _ = causal_conv1d(
            qkv, weight, packing=packing, activation="silu", output_final_state=False
        )
        parts: tuple[Tensor, ...] = qkv.split(widths, -1)
        return parts


class GatedDeltaNet(DeltaRule):
    """Gated delta rule as in Qwen3.5: one decay per head; projections of each input."""

    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int
    A_log: Tensor
    dt_bias: Tensor
    norm: Submodule
    out_proj: Submodule
    in_proj_qkv: Submodule
    in_proj_z: Submodule
    in_proj_b: Submodule
    in_proj_a: Submodule

    def project(self, x: Tensor) -> Projected:
        return self.decayed(
            self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x).sigmoid(), self.in_proj_z(x)
        )

    def decayed(self, qkv: Tensor, a: Tensor, beta: Tensor, gate: Tensor) -> Projected:
        """Compute the decay g of ``a [T, HV]``."""
        g = -_work(self.A_log).exp() * softplus(_work(a) + self.dt_bias)
        return Projected(qkv, g, _work(beta), gate)

    def mix(self, x: Projected, packing: Packing) -> Tensor:
        q, k, v = self.convolved(x.qkv, [self.key_dim, self.key_dim, self.value_dim], packing)
        q, k = (_by_head(each, self.head_k_dim) for each in (q, k))
        v = _by_head(v, self.head_v_dim)
        g, beta = x.g.to(_dtype(v)), x.beta.to(_dtype(v))
        o, _ = gated_delta_rule(q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False)
        return self.finish(o.flatten(0, 1), _by_head(x.gate, self.head_v_dim).flatten(0, 1))

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate the rows [T * HV, V] of all heads, and project tokens."""
        return self.out_proj(self.norm(o, gate).view(-1, self.value_dim))


class JointGatedDeltaNet(GatedDeltaNet):
    """Gated delta rule as in Qwen3-Next, whose projections interleave the inputs by key heads."""

    in_proj_qkvz: Submodule
    in_proj_ba: Submodule
    fix_query_key_value_ordering: Callable[..., tuple[Tensor, ...]]

    def project(self, x: Tensor) -> Projected:
        parts = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(x)[None], self.in_proj_ba(x)[None]
        )
        q, k, v, z, b, a = (part[0].flatten(1) for part in parts)
        return self.decayed(torch.cat([q, k, v], -1), a, b.sigmoid(), z)


class SeparateGatedDeltaNet(GatedDeltaNet):
    """Gated delta rule as in OLMo Hybrid, where beta may reach 2."""

    q_proj: Submodule
    k_proj: Submodule
    v_proj: Submodule
    a_proj: Submodule
    b_proj: Submodule
    g_proj: Submodule
    o_norm: Submodule
    o_proj: Submodule
    allow_neg_eigval: bool

    def project(self, x: Tensor) -> Projected:
        beta = self.b_proj(x).sigmoid() * (2.0 if self.allow_neg_eigval else 1.0)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return self.decayed(qkv, self.a_proj(x), beta, self.g_proj(x))

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(o, gate).view(-1, self.value_dim))


class KimiDeltaAttention(DeltaRule):
    """Kimi delta attention as in Ling 3: a decay per channel."""

    qkv_dim: int
    head_dim: int
    q_proj: Submodule
    k_proj: Submodule
    v_proj: Submodule
    b_proj: Submodule
    g_proj: Submodule
    forget_gate: Submodule
    o_norm: Submodule
    o_proj: Submodule

    def project(self, x: Tensor) -> Projected:
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return Projected(qkv, self.forget_gate(x[None])[0], self.b_proj(x).sigmoid(), self.gate(x))

    def gate(self, x: Tensor) -> Tensor:
        """Project the output gate [T, H * V]."""
        return self.g_proj(x)

    def mix(self, x: Projected, packing: Packing) -> Tensor:
        widths = [self.qkv_dim] * 3
        q, k, v = (_by_head(y, self.head_dim) for y in self.convolved(x.qkv, widths, packing))
        g, beta = x.g.to(_dtype(v)), x.beta.to(_dtype(v))
        o, _ = kimi_delta_attention(
            q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False
        )
        return self.o_proj(self.o_norm(o, _by_head(x.gate, self.head_dim)).flatten(1))


class LowRankGateKimiDeltaAttention(KimiDeltaAttention):
    """Kimi delta attention as in Kimi Linear, whose output gate has a low rank."""

    g_a_proj: Submodule
    g_b_proj: Submodule

    def gate(self, x: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(x))


TWINS: dict[str, type[Twin]] = {
    "Qwen3NextGatedDeltaNet": JointGatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": SeparateGatedDeltaNet,
    "KimiLinearDeltaAttention": LowRankGateKimiDeltaAttention,
    "Glm5NextTextLinearAttention": LowRankGateKimiDeltaAttention,
    "BailingHybridDeltaAttention": KimiDeltaAttention,
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
}


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _work(x: Tensor) -> Tensor:
    return x.to(_dtype(x))
