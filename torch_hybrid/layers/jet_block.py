"""The linear mixer of Jet-Nemotron, as a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.planned import planned_for
from torch_hybrid.backends.recurrences import sizes_of
from torch_hybrid.backends.recurrent import At, RecurrentPlan, convolve
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution, init_decays
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.composed import Parts
from torch_hybrid.ops.delta_rule.op import gated_delta_rule
from torch_hybrid.specs import STATE_RECORDS, JetBlockSpec


class JetBlock(Mixer):
    """Projection, convolution of values by each token's own filters, gated delta rule, gated
    RMSNorm, projection.

    One input projection gives ``[q | k | v | z | b | a | f]``. The filters of a token's channels
    are ``conv_weight + filter_proj(silu(f))``. SiLU is applied to q, k and the convolved v.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: JetBlockSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        self.spec = spec
        self.in_proj = linear(dim, sum(self._widths))
        self.filter_proj = linear(spec.filter_rank, spec.v_channels * spec.conv_width)
        self.out_proj = linear(spec.v_channels, dim)

        self.conv_weight = parameter(spec.v_channels, spec.conv_width)
        self.A_log = parameter(spec.num_heads)
        self.dt_bias = parameter(spec.num_heads)
        self.norm_weight = parameter(spec.head_v_dim)
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        spec = self.spec
        k, v, heads = spec.k_channels, spec.v_channels, spec.num_heads
        return [k, k, v, v, heads, heads, spec.filter_rank]

    def reset_parameters(self) -> None:
        """Initialise as the published models do: decays with time constants of 1 to 1000 tokens."""
        init_convolution(self.conv_weight)
        init_decays(self.A_log, self.dt_bias)
        nn.init.ones_(self.norm_weight)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        spec = self.spec
        q, k, v, z, b, a, f = columns(self.in_proj, x, self._widths)
        filters = self.filter_proj(F.silu(f)).unflatten(-1, (spec.v_channels, spec.conv_width))
        v = convolve(v, self.conv_weight, None, plan, cache, activation="silu", token_taps=filters)

        def remember(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
            k, v, b, a = advancing
            return self._remember(reading[0], k, v, b, a, plan, at, cache)

        o = walk(remember, [F.silu(k), v, b, a], [F.silu(q)], plan, cache, STATE_RECORDS).float()
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + spec.norm_eps)
        gated = self.norm_weight.float() * normed * F.silu(z.float().view_as(o))
        out: Tensor = self.out_proj(gated.flatten(1).to(x.dtype))
        return out

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        a: Tensor,
        plan: RecurrentPlan,
        at: At,
        cache: LayerCache,
    ) -> Tensor:
        """Advance the states, and read them by queries -> [T, H, V]."""
        q, k, v = (part.unflatten(-1, (self.spec.num_heads, -1)) for part in (q, k, v))
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        planned = planned_for(plan.planned, sizes_of(self.spec))
        return gated_delta_rule(
            *(q, k, v, g, b.float().sigmoid(), cache["state"]),
            *(at.cu_seqlens, at.initial_indices, at.state_indices),
            scale=self.spec.head_k_dim**-0.5,
            qk_l2norm=True,
            impl=plan.statics.impl("gated_delta_rule"),
            **Parts(impls=(), planned=planned).given,
        )

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        key, value = (spec.num_heads, spec.head_k_dim), (spec.num_heads, spec.head_v_dim)
        head = (spec.num_heads, 1)
        return {
            "in_proj": [key, key, value, value, head, head, (1, spec.filter_rank)],
            "filter_proj": [(spec.num_heads, spec.head_v_dim * spec.conv_width)],
            "out_proj": spec.num_heads,
            "conv_weight": [value],
            "A_log": [head],
            "dt_bias": [head],
        }
