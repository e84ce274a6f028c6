"""The mLSTM mixer of xLSTM, as a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import At, RecurrentPlan
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.specs import MlstmSpec


class Mlstm(Mixer):
    """Projection, matrix memory with exponential gates, LayerNorm per head, gate, projection.

    One input projection gives ``[q | k | v | gate | i | f]``. Per head, with soft-capped i and f:

        C = sigmoid(f) C + e^i v k^T
        n = sigmoid(f) n + e^i k
        h = C q / max(|n q|, 1),    q scaled by K^-1/2

    n is the memory of values that are 1. Published code divides C and n by e^m, where m is the
    largest exponent so far. Its denominator is ``max(|n q|, e^-m) + eps``: the same but for eps,
    whose effect after the norm is below rounding (see ``ops/ssd/README.md``). Soft caps bound the
    exponents, so that float32 holds C undivided.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: MlstmSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=False, dtype=dtype, device=device)
        self.out_proj = nn.Linear(spec.v_channels, dim, bias=False, dtype=dtype, device=device)
        self.gate_bias = parameter(2 * spec.num_heads)
        self.norm_weight = nn.Parameter(torch.ones(spec.v_channels, dtype=dtype, device=device))
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        k, v = self.spec.k_channels, self.spec.v_channels
        return [k, k, v, v, 2 * self.spec.num_heads]

    def reset_parameters(self) -> None:
        """Initialise as the published models do: tokens are hardly written, hardly forgotten."""
        with torch.no_grad():
            i, f = self.gate_bias.chunk(2)
            i.fill_(-10.0)
            f.copy_(torch.linspace(3.0, 6.0, len(f), dtype=f.dtype, device=f.device))

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        q, k, v, gate, gates = columns(self.in_proj, x, self._widths)

        def remember(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
            (k, v, gates), (q,) = advancing, reading
            return self._remember(q, k, v, gates, plan, at, cache)

        read = walk(remember, [k, v, gates], [q], plan, cache)
        h = self._norm(self._normalized(read.float()))
        out: Tensor = self.out_proj((h * gate.float().sigmoid()).to(x.dtype))
        return out

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor,
        plan: RecurrentPlan,
        at: At,
        cache: LayerCache,
    ) -> Tensor:
        """Update the memory and read it by queries -> [T, H, memory_dim].

        What queries read of values comes first, then what they read of ones.
        """
        spec = self.spec
        heads = (spec.num_heads, -1)
        q, k, v = (part.unflatten(-1, heads) for part in (q, k, v))
        v = F.pad(v, (0, spec.memory_dim - spec.head_v_dim), value=1.0)
        if v.dtype == torch.float16:  # too narrow for what exponential gates weigh
            q, k, v = q.float(), k.float(), v.float()
        gates = gates.float() + self.gate_bias.float()
        i, f = (spec.gate_softcap * torch.tanh(gates / spec.gate_softcap)).chunk(2, dim=-1)
        return ssd(
            *(q, k, v, F.logsigmoid(f), i.exp(), None, cache["state"]),
            *(at.cu_seqlens, at.initial_indices, at.state_indices),
            scale=spec.head_k_dim**-0.5,
            impl=plan.statics.impl("ssd"),
        )

    def _normalized(self, read: Tensor) -> Tensor:
        """Divide what queries read of values by what they read of ones -> [T, H, V]."""
        values, ones = read.tensor_split([self.spec.head_v_dim], dim=-1)
        h: Tensor = values / ones[..., :1].abs().clamp(min=1.0)
        return h

    def _norm(self, h: Tensor) -> Tensor:
        """Normalise each head (LayerNorm, no bias) in float32: [T, H, V] -> [T, channels]."""
        normed = F.layer_norm(h, h.shape[-1:], eps=self.spec.norm_eps)
        return normed.flatten(1) * self.norm_weight.float()

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        head, keys, values = (
            (spec.num_heads, width) for width in (1, spec.head_k_dim, spec.head_v_dim)
        )
        return {
            "in_proj": [keys, keys, values, values, head, head],
            "out_proj": spec.num_heads,
            "gate_bias": [head, head],
            "norm_weight": [values],
        }
