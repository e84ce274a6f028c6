"""The Mamba2 mixer of Falcon-H1, Nemotron-H, Granite-4-H and Bamba, as a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrences import sizes_of
from torch_hybrid.backends.recurrent import RecurrentPlan, run_mixer
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution, init_decays
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.ssd.gated_norm import gate_with_norm
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep, ssd_step
from torch_hybrid.ranks import Ranks, own_means
from torch_hybrid.specs import Mamba2Spec


class Mamba2(Mixer):
    """Projection, causal convolution, state-space recurrence, gate and norm, projection.

    One input projection gives ``[z | x | B | C | dt]``, whose slices the rest reads.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        bias: whether the projections have a bias.
        conv_bias: whether the convolution has one.
        dtype, device: dtype and device of the parameters.
    """

    norm_weight: nn.Parameter | None
    conv_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        spec: Mamba2Spec,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        self._group_means: Callable[[Tensor], Tensor] = own_means
        self._shares_groups = False  # True if several ranks share a group of the norm
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=bias, dtype=dtype, device=device)
        self.out_proj = nn.Linear(spec.inner_dim, dim, bias=bias, dtype=dtype, device=device)

        self.conv_weight = parameter(spec.conv_channels, spec.conv_width)
        self.conv_bias = parameter(spec.conv_channels) if conv_bias else None
        self.A_log = parameter(spec.num_heads)
        self.dt_bias = parameter(spec.num_heads)
        self.D = parameter(spec.num_heads)
        self.norm_weight = parameter(spec.inner_dim) if spec.gate != "no_norm" else None
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        return [self.spec.inner_dim, self.spec.conv_channels, self.spec.num_heads]

    def reset_parameters(self) -> None:
        """Initialise as the published models do: steps of 0.001 to 0.1, decay rates of 1 to 16."""
        init_convolution(self.conv_weight, self.conv_bias)
        init_decays(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        z, mixed, dt = columns(self.in_proj, x, self._widths)
        spec, gated = self.spec, not self._shares_groups
        step = SsdStep(
            mixed,
            z if gated else None,
            dt,
            self.conv_weight,
            self.conv_bias,
            self.A_log,
            self.dt_bias,
            self.D,
            self.norm_weight if gated else None,
            cache["conv"],
            cache["state"],
            plan.cu_seqlens,
            plan.initial_indices,
            plan.state_indices,
            activation=spec.activation,
            dt_min=spec.dt_min,
            dt_max=spec.dt_max,
            norm_before_gate=spec.gate == "after_norm",
            norm_groups=spec.norm_groups,
            norm_eps=spec.norm_eps,
            impl=plan.statics.impl("ssd_step"),
        )
        y = run_mixer(ssd_step, step, plan, cache, sizes_of(spec))
        out: Tensor = self.out_proj(y if gated else self._gate(y, z))
        return out

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        inner, group = (spec.num_heads, spec.head_dim), (spec.num_groups, spec.state_dim)
        head = (spec.num_heads, 1)
        return {
            "in_proj": [inner, inner, group, group, head],
            "out_proj": spec.num_heads,
            "conv_weight": [inner, group, group],
            "conv_bias": [inner, group, group],
            "A_log": [head],
            "dt_bias": [head],
            "D": [head],
            "norm_weight": [inner],
        }

    def shard(self, ranks: Ranks) -> Self:
        part, groups = super().shard(ranks), self.spec.norm_groups
        part._group_means = partial(ranks.mean_of_groups, num_groups=groups)
        part._shares_groups = self.spec.gate != "no_norm" and groups % ranks.size != 0
        return part

    def _gate(self, o: Tensor, z: Tensor) -> Tensor:
        """Gate and normalise o where ranks share a group of the norm."""
        return gate_with_norm(
            o,
            z,
            self.norm_weight,
            norm_before_gate=self.spec.gate == "after_norm",
            num_groups=self.spec.norm_groups,
            eps=self.spec.norm_eps,
            mean_of=self._group_means,
        )
