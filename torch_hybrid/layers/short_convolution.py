"""The gated short convolution of LFM2 and LFM3, as a module of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.specs import ShortConvolutionSpec


class ShortConvolution(Mixer):
    """Projection, gate, causal convolution, gate, projection.

    One input projection gives ``[input gate | output gate | x]``.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        bias: whether the projections and the convolution have a bias.
        dtype, device: dtype and device of the parameters.
    """

    conv_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        spec: ShortConvolutionSpec,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        channels = spec.channels
        self.in_proj = nn.Linear(dim, 3 * channels, bias=bias, dtype=dtype, device=device)
        self.out_proj = nn.Linear(channels, dim, bias=bias, dtype=dtype, device=device)

        self.conv_weight = parameter(channels, spec.conv_width)
        self.conv_bias = parameter(channels) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the convolution as torch does; the projections have initialised themselves."""
        init_convolution(self.conv_weight, self.conv_bias)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        input_gate, output_gate, mixed = columns(self.in_proj, x, [self.spec.channels] * 3)
        y = convolve(
            mixed,
            self.conv_weight,
            self.conv_bias,
            plan,
            cache,
            activation="none",
            input_gate=input_gate,
            output_gate=output_gate,
        )
        out: Tensor = self.out_proj(y)
        return out

    def blocks(self) -> dict[str, Blocks]:
        channels = (self.spec.channels, 1)
        return {
            "in_proj": [channels] * 3,
            "out_proj": self.spec.channels,
            "conv_weight": [channels],
            "conv_bias": [channels],
        }
