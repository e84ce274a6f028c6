"""The gated-delta-rule mixer of Qwen3-Next, Qwen3.5 and OLMo-hybrid, as a module of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrences import sizes_of
from torch_hybrid.backends.recurrent import RecurrentPlan, run_mixer
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution, init_decays
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep, gated_delta_step
from torch_hybrid.specs import DeltaRuleSpec


class GatedDeltaNet(Mixer):
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
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=False, dtype=dtype, device=device)
        self.out_proj = nn.Linear(spec.v_channels, dim, bias=False, dtype=dtype, device=device)

        self.conv_weight = parameter(spec.conv_channels, spec.conv_width)
        self.A_log = parameter(spec.num_v_heads)
        self.dt_bias = parameter(spec.num_v_heads)
        self.norm_weight = parameter(spec.head_v_dim)
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        spec = self.spec
        return [spec.conv_channels, spec.v_channels, spec.num_v_heads, spec.num_v_heads]

    def reset_parameters(self) -> None:
        """Initialise as the published models do: decays with time constants of 1 to 1000 tokens."""
        init_convolution(self.conv_weight)
        init_decays(self.A_log, self.dt_bias)
        nn.init.ones_(self.norm_weight)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        qkv, z, b, a = columns(self.in_proj, x, self._widths)
        spec = self.spec
        step = GatedDeltaStep(
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
            impl=plan.statics.impl("gated_delta_step"),
        )
        mixed = run_mixer(gated_delta_step, step, plan, cache, sizes_of(spec))
        out: Tensor = self.out_proj(mixed)
        return out

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        key, value = (spec.num_k_heads, spec.head_k_dim), (spec.num_v_heads, spec.head_v_dim)
        head = (spec.num_v_heads, 1)
        return {
            "in_proj": [key, key, value, value, head, head],
            "out_proj": spec.num_v_heads,
            "conv_weight": [key, key, value],
            "A_log": [head],
            "dt_bias": [head],
        }
