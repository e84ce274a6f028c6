"""The Kimi-delta-attention mixer of Kimi-Linear and Ling-3, as a module of its own."""

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
from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep, kimi_delta_step
from torch_hybrid.specs import KimiDeltaSpec


class KimiDeltaAttention(Mixer):
    """Projection, causal convolution, Kimi delta attention, gated RMSNorm, projection.

    One input projection gives ``[q | k | v | f | g | b]``, so that the convolution and the rule
    read slices of it without a copy. The decay f and the output gate g have full width (Ling-3), or
    a low rank with a second projection each (Kimi-Linear). In Kimi-K3 f alone has a low rank.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        gate_rank: rank of f and g; None for full width.
        has_full_gate: whether g has full width in any case.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: KimiDeltaSpec,
        *,
        gate_rank: int | None = None,
        has_full_gate: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        self._gate_ranks = gate_rank, None if has_full_gate else gate_rank
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=False, dtype=dtype, device=device)
        self.f_b_proj, self.g_b_proj = (
            nn.Identity()
            if rank is None
            else nn.Linear(rank, width, bias=False, dtype=dtype, device=device)
            for rank, width in zip(self._gate_ranks, self._gate_widths, strict=True)
        )
        self.out_proj = nn.Linear(spec.v_channels, dim, bias=False, dtype=dtype, device=device)
        self.conv_weight = parameter(spec.conv_channels, spec.conv_width)
        self.A_log = parameter(spec.num_heads)
        self.dt_bias = parameter(spec.num_heads, spec.head_k_dim)
        self.norm_weight = parameter(spec.head_v_dim)
        self.reset_parameters()

    @property
    def _gate_widths(self) -> tuple[int, int]:
        return self.spec.k_channels, self.spec.v_channels

    @property
    def _widths(self) -> list[int]:
        pairs = zip(self._gate_ranks, self._gate_widths, strict=True)
        gates = [width if rank is None else rank for rank, width in pairs]
        return [self.spec.conv_channels, *gates, self.spec.num_heads]

    def reset_parameters(self) -> None:
        """Initialise as the published models do: decays with time constants of 1 to 1000 tokens."""
        init_convolution(self.conv_weight)
        init_decays(self.A_log, self.dt_bias)
        nn.init.ones_(self.norm_weight)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        qkv, f, gate, b = columns(self.in_proj, x, self._widths)
        f, gate = self.f_b_proj(f), self.g_b_proj(gate)
        spec = self.spec
        step = KimiDeltaStep(
            qkv,
            gate,
            b,
            f,
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
            gate_lower_bound=spec.gate_lower_bound,
            norm_eps=spec.norm_eps,
            impl=plan.statics.impl("kimi_delta_step"),
        )
        mixed = run_mixer(kimi_delta_step, step, plan, cache, sizes_of(spec))
        out: Tensor = self.out_proj(mixed)
        return out

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        key, value = (spec.num_heads, spec.head_k_dim), (spec.num_heads, spec.head_v_dim)
        head = (spec.num_heads, 1)
        of_gates = zip(("f_b_proj", "g_b_proj"), self._gate_ranks, (key, value), strict=True)
        second: dict[str, Blocks] = {}
        gates = []
        for name, rank, heads in of_gates:
            gates.append(heads if rank is None else (1, rank))
            if rank is not None:
                second[name] = [heads]
        return {
            "in_proj": [key, key, value, *gates, head],
            **second,
            "out_proj": spec.num_heads,
            "conv_weight": [key, key, value],
            "A_log": [head],
            "dt_bias": [head],
        }
