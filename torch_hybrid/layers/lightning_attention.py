"""The lightning-attention mixer of MiniMax-01 and Ring-2.5, as a module of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrences import sizes_of
from torch_hybrid.backends.recurrent import RecurrentPlan, run_mixer
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.rotary import Rotary
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.ssd.gated_norm import norm_and_gate
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep, lightning_step
from torch_hybrid.ranks import Ranks, own_means
from torch_hybrid.specs import LightningSpec

_CPU = torch.device("cpu")


def geometric_slopes(num_heads: int, device: torch.device = _CPU) -> Tensor:
    """Compute decay rates [H] float32 ``2^(-8 (h + 1) / H)``, for any H (MiniMax-01)."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    return torch.exp2(-8 * heads / num_heads).float()


def alibi_slopes(num_heads: int, device: torch.device = _CPU) -> Tensor:
    """Compute decay rates [H] float32 as in ALiBi (Ring-2.5).

    If H is no power of two, the rates for the largest power P below it come first. Every other rate
    for 2 P follows, from the first on.
    """
    power = 1 << math.floor(math.log2(num_heads))
    between = geometric_slopes(2 * power, device)[::2][: num_heads - power]
    return torch.cat([geometric_slopes(power, device), between])


class LightningAttention(Mixer):
    """Projection, linear attention with a fixed decay per head, RMSNorm, gate, projection.

    One input projection gives ``[q | k | v | gate]``.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        slopes: [H] float32, minus the log decay of a token in each head.
        dtype, device: dtype and device of the parameters.
    """

    slopes: Tensor
    q_norm_weight: nn.Parameter | None
    k_norm_weight: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        spec: LightningSpec,
        slopes: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if list(slopes.shape) != [spec.num_heads]:
            raise ValueError(f"slopes must have shape [{spec.num_heads}], got {[*slopes.shape]}")
        self.spec = spec
        self._group_means: Callable[[Tensor], Tensor] = own_means
        self._shares_groups = False  # True if several ranks share a group of the norm
        channels = spec.channels
        self.in_proj = nn.Linear(dim, 4 * channels, bias=False, dtype=dtype, device=device)
        self.out_proj = nn.Linear(channels, dim, bias=False, dtype=dtype, device=device)

        def norm_weight(width: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(width, dtype=dtype, device=device))

        self.q_norm_weight = norm_weight(spec.head_dim) if spec.qk_norm else None
        self.k_norm_weight = norm_weight(spec.head_dim) if spec.qk_norm else None
        self.norm_weight = norm_weight(channels)
        self.register_buffer("slopes", slopes.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LightningAttention:
        """Move the slopes with the weights, and never cast them."""
        exact = self.slopes
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.slopes = exact.to(self.slopes.device)
        return self

    @in_own_dtype(1)
    def forward(
        self, x: Tensor, plan: RecurrentPlan, cache: LayerCache, rotary: Rotary | None = None
    ) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.
            rotary: cosines and sines of the tokens' positions, where q and k are rotated.

        Returns:
            [T, dim].
        """
        channels = self.spec.channels
        qkv, gate = columns(self.in_proj, x, [3 * channels, channels])
        spec, gated = self.spec, not self._shares_groups
        cos, sin = rotary or (None, None)
        step = LightningStep(
            qkv,
            gate if gated else None,
            self.q_norm_weight,
            self.k_norm_weight,
            cos,
            sin,
            self.slopes,
            self.norm_weight if gated else None,
            cache["state"],
            plan.cu_seqlens,
            plan.initial_indices,
            plan.state_indices,
            activation=spec.activation,
            scale=spec.scale,
            norm_groups=spec.norm_groups,
            norm_eps=spec.norm_eps,
            impl=plan.statics.impl("lightning_step"),
        )
        y = run_mixer(lightning_step, step, plan, cache, sizes_of(spec))
        out: Tensor = self.out_proj(y if gated else self._gated_norm(y, gate))
        return out

    def blocks(self) -> dict[str, Blocks]:
        head = [(self.spec.num_heads, self.spec.head_dim)]
        return {"in_proj": head * 4, "out_proj": self.spec.num_heads, "norm_weight": head}

    def shard(self, ranks: Ranks) -> Self:
        part, groups = super().shard(ranks), self.spec.norm_groups
        part.slopes = ranks.cut(self.slopes, [(self.spec.num_heads, 1)])
        part._group_means = partial(ranks.mean_of_groups, num_groups=groups)
        part._shares_groups = groups % ranks.size != 0
        return part

    def _gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate o where ranks share a group of the norm."""
        return norm_and_gate(
            o,
            gate,
            self.norm_weight,
            num_groups=self.spec.norm_groups,
            eps=self.spec.norm_eps,
            mean_of=self._group_means,
        )
