"""The recurrent block of Griffin (RecurrentGemma), as a module of its own."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve, run_rule
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.rg_lru import rg_lru
from torch_hybrid.specs import RgLruSpec

_SHARPNESS = 8.0  # c in a = exp(-c r softplus(a_param))


class RgLru(Mixer):
    """Projection, causal convolution, real-gated linear recurrent unit, gate, projection.

    One input projection gives ``[x | y]``; the output is that of the recurrence over x, multiplied
    by GELU(y). A head's gates are a projection of its own channels, ``[input | recurrent]``.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        dim: int,
        spec: RgLruSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        heads, width, channels = spec.num_heads, spec.head_dim, spec.channels
        self.in_proj = nn.Linear(dim, 2 * channels, dtype=dtype, device=device)
        self.out_proj = nn.Linear(channels, dim, dtype=dtype, device=device)

        self.conv_weight = parameter(channels, spec.conv_width)
        self.conv_bias = parameter(channels)
        self.gates = HeadLinear(parameter(heads, width, 2 * width), parameter(heads, 2 * width))
        self.a_param = parameter(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the published models do: an open gate decays by 0.9 to 0.999."""
        init_convolution(self.conv_weight, self.conv_bias)
        nn.init.normal_(self.gates.weight, std=self.spec.head_dim**-0.5)
        assert self.gates.bias is not None
        nn.init.zeros_(self.gates.bias)
        with torch.no_grad():
            decay = torch.empty_like(self.a_param).uniform_(0.9, 0.999)
            self.a_param.copy_(torch.expm1(-decay.log() / _SHARPNESS).log())

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        spec = self.spec
        mixed, y = columns(self.in_proj, x, [spec.channels] * 2)
        mixed = convolve(mixed, self.conv_weight, self.conv_bias, plan, cache, activation="none")
        gates = self.gates(mixed.view(-1, spec.num_heads, spec.head_dim))
        log_a = -_SHARPNESS * F.softplus(self.a_param.float())
        h = run_rule(rg_lru, (mixed, gates), (log_a, cache["state"]), plan, cache)
        out: Tensor = self.out_proj(h * F.gelu(y, approximate="tanh"))
        return out

    def blocks(self) -> dict[str, Blocks]:
        spec = self.spec
        channels = (spec.num_heads, spec.head_dim)
        return {
            "in_proj": [channels] * 2,
            "out_proj": spec.num_heads,
            "conv_weight": [channels],
            "conv_bias": [channels],
            "gates": [(spec.num_heads, 1)],
            "a_param": [channels],
        }
