"""The gated-delta-rule mixer of Qwen3-Next, Qwen3.5 and OLMo-hybrid, as a module of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.gated_delta_rule import STEP, apply_delta_rule
from torch_hybrid.backends.recurrent import (
    RecurrentPlan,
    convolve,
    drafts_of,
    walk_layer,
    whole_impl,
)
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.delta_rule import gated_delta_step
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import DeltaRuleSpec


class GatedDeltaNet(nn.Module):
    """Projection, causal convolution, gated delta rule, gated RMSNorm, projection.

    One input projection gives ``[q | k | v | z | b | a]``, so that the convolution and the rule
    read slices of it without a copy.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: DeltaRuleSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        widths = [spec.conv_channels, spec.v_channels, spec.num_v_heads, spec.num_v_heads]
        self._widths = widths
        self.in_proj = nn.Linear(dim, sum(widths), bias=False, dtype=dtype, device=device)
        self.out_proj = nn.Linear(spec.v_channels, dim, bias=False, dtype=dtype, device=device)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.conv_weight = parameter(spec.conv_channels, spec.conv_width)
        self.A_log = parameter(spec.num_v_heads)
        self.dt_bias = parameter(spec.num_v_heads)
        self.norm_weight = parameter(spec.head_v_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the published models do: decays with time constants of 1 to 1000 tokens."""
        nn.init.uniform_(
            self.conv_weight, -(self.spec.conv_width**-0.5), self.spec.conv_width**-0.5
        )
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
        nn.init.uniform_(self.dt_bias, -7.0, -2.0)
        nn.init.ones_(self.norm_weight)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.

        Returns:
            [T, dim].
        """
        qkv, z, b, a = columns(self.in_proj, x, self._widths)
        impl = whole_impl(plan, STEP)

        def mix(
            advancing: Sequence[Tensor], reading: Sequence[Tensor], plan: RecurrentPlan
        ) -> Tensor:
            (qkv, b, a), (z,) = advancing, reading
            if impl is None:
                return self._mix_by_parts(qkv, z, b, a, plan, cache)
            return self._step(qkv, z, b, a, plan, cache, impl)

        out: Tensor = self.out_proj(walk_layer(mix, [qkv, b, a], [z], plan, cache))
        return out

    def _step(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        plan: RecurrentPlan,
        cache: LayerCache,
        impl: str,
    ) -> Tensor:
        """Run all between the projections as one op, with the step's drafts if it has some."""
        spec = self.spec
        out: Tensor = gated_delta_step(
            qkv,
            z,
            b,
            a,
            self.conv_weight,
            None,
            self.A_log,
            self.dt_bias,
            self.norm_weight,
            cache["conv"],
            cache["state"],
            plan.cu_seqlens,
            plan.initial_indices,
            plan.state_indices,
            activation=spec.activation,
            scale=spec.head_k_dim**-0.5,
            beta_scale=spec.beta_scale,
            norm_eps=spec.norm_eps,
            gate=spec.gate,
            impl=impl,
            **drafts_of(plan, cache),
        )
        return out

    def _mix_by_parts(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, plan: RecurrentPlan, cache: LayerCache
    ) -> Tensor:
        """Run convolution and rule as an op each, with compiled code between and after them."""
        spec, num_tokens = self.spec, qkv.shape[0]
        mixed = convolve(qkv, self.conv_weight, None, plan, cache, activation=spec.activation)
        q, k, v = mixed.split([spec.k_channels, spec.k_channels, spec.v_channels], dim=-1)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        beta = b.float().sigmoid() * spec.beta_scale
        o = apply_delta_rule(
            q.view(num_tokens, spec.num_k_heads, spec.head_k_dim),
            k.view(num_tokens, spec.num_k_heads, spec.head_k_dim),
            v.view(num_tokens, spec.num_v_heads, spec.head_v_dim),
            g,
            beta,
            spec,
            plan,
            cache["state"],
        )
        return self._gated_norm(o, z.view_as(o)).flatten(1)

    def shard(self, ranks: Ranks) -> GatedDeltaNet:
        """Make this rank's layer: it keeps the states of its heads, and sums outputs over ranks.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        spec = self.spec
        with on_meta():
            part = GatedDeltaNet(self.in_proj.in_features, spec.divided(ranks.size))
        key, value = (spec.num_k_heads, spec.head_k_dim), (spec.num_v_heads, spec.head_v_dim)
        head = (spec.num_v_heads, 1)
        part.in_proj = ranks.rows(self.in_proj, [key, key, value, value, head, head])
        part.out_proj = ranks.summed_columns(self.out_proj, spec.num_v_heads)
        part.conv_weight = ranks.parameter(self.conv_weight, [key, key, value])
        part.A_log = ranks.parameter(self.A_log, [head])
        part.dt_bias = ranks.parameter(self.dt_bias, [head])
        part.norm_weight = self.norm_weight
        return part

    def _gated_norm(self, o: Tensor, z: Tensor) -> Tensor:
        """Normalise each head (RMSNorm), then gate it; the weight applies after the cast back."""
        o32 = o.float()
        normed = o32 * torch.rsqrt(o32.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps)
        weighted = self.norm_weight * normed.to(o.dtype)
        gate = F.silu(z.float()) if self.spec.gate == "silu" else z.float().sigmoid()
        return (weighted * gate).to(o.dtype)
