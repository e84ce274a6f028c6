"""Twins of mixers of the gated delta rule and of Kimi delta attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from torch_hybrid.functional import gated_delta_rule, kimi_delta_attention
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import (
    Submodule,
    Twin,
    as_work,
    by_head,
    convolved,
    gated_norm,
    work_dtype,
)


class Projected(NamedTuple):
    """Inputs of a mixer's ops: qkv [T, C] before the convolution, the output gate [T, HV * V]."""

    qkv: Tensor
    g: Tensor  # [T, HV], or [T, H, K] of channels that decay on their own; natural log
    beta: Tensor  # [T, HV]
    gate: Tensor


class DeltaRule(Twin):
    """Mixer of a delta rule; subclasses know how their families project tokens."""

    activation: Literal["silu"]
    conv1d: nn.Conv1d

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        return self.mix(self.project(x), packing)

    def project(self, x: Tensor) -> Projected:
        """Project tokens [T, D]."""
        raise NotImplementedError

    def mix(self, x: Projected, packing: Packing) -> Tensor:
        """Run the ops of the mixer; return [T, D]."""
        raise NotImplementedError


class GatedDeltaNet(
    DeltaRule,
    of=(
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "LaraMiniGatedDeltaNet",
        "Qwen4ExpTextGatedDeltaNet",
    ),
):
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
        g = -as_work(self.A_log).exp() * softplus(as_work(a) + self.dt_bias)
        return Projected(qkv, g, as_work(beta), gate)

    def mix(self, x: Projected, packing: Packing) -> Tensor:
        widths = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = convolved(self.conv1d, x.qkv, packing, self.activation).split(widths, -1)
        q, k = (by_head(each, self.head_k_dim) for each in (q, k))
        v = by_head(v, self.head_v_dim)
        g, beta = x.g.to(work_dtype(v)), x.beta.to(work_dtype(v))
        o, _ = gated_delta_rule(q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False)
        return self.finish(o.flatten(0, 1), by_head(x.gate, self.head_v_dim).flatten(0, 1))

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate the rows [T * HV, V] of all heads, and project tokens."""
        return self.out_proj(gated_norm(self.norm, o, gate).view(-1, self.value_dim))


class JointGatedDeltaNet(GatedDeltaNet, of=("Qwen3NextGatedDeltaNet",)):
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


class SeparateGatedDeltaNet(GatedDeltaNet, of=("OlmoHybridGatedDeltaNet",)):
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
        return self.o_proj(gated_norm(self.o_norm, o, gate).view(-1, self.value_dim))


class KimiDeltaAttention(DeltaRule, of=("BailingHybridDeltaAttention",)):
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
        qkv = convolved(self.conv1d, x.qkv, packing, self.activation)
        q, k, v = (by_head(y, self.head_dim) for y in qkv.split(self.qkv_dim, -1))
        g, beta = x.g.to(work_dtype(v)), x.beta.to(work_dtype(v))
        o, _ = kimi_delta_attention(
            q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False
        )
        heads = o.flatten(0, 1), x.gate.reshape(-1, self.head_dim)
        return self.o_proj(gated_norm(self.o_norm, *heads).view(-1, self.qkv_dim))


class LowRankGateKimiDeltaAttention(
    KimiDeltaAttention, of=("KimiLinearDeltaAttention", "Glm5NextTextLinearAttention")
):
    """Kimi delta attention as in Kimi Linear, whose output gate has a low rank."""

    g_a_proj: Submodule
    g_b_proj: Submodule

    def gate(self, x: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(x))
