"""The Mamba mixer of Mamba, Falcon-Mamba, Jamba and Zamba, as a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import At, RecurrentPlan, convolve
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter, init_convolution
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.side_by_side import columns
from torch_hybrid.ops.selective_scan import selective_scan
from torch_hybrid.specs import STATE_RECORDS, MambaSpec


class Mamba(Mixer):
    """Projection, causal convolution, projections to dt, B and C, scan and gate, projection.

    One input projection gives ``[x | z]``. A second gives ``[dt | B | C]`` from x after its
    convolution, a third the step sizes of all channels from dt. The scan adds their bias, so that
    the sum is not rounded to the model's dtype. With several heads, each has a second and a third
    projection of its own, for its channels.

    Args:
        dim: width of the model.
        spec: the mixer's facts.
        bias: whether the input and output projections have a bias.
        conv_bias: whether the convolution has one.
        dtype, device: dtype and device of the parameters.
    """

    conv_bias: nn.Parameter | None
    x_proj: nn.Linear | HeadLinear
    dt_proj: nn.Linear | HeadLinear

    def __init__(
        self,
        dim: int,
        spec: MambaSpec,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec

        def norm(width: int) -> nn.Module:
            if spec.norm_eps is None:
                return nn.Identity()
            return nn.RMSNorm(width, eps=spec.norm_eps, dtype=dtype, device=device)

        self._widths = [spec.dt_rank, spec.state_dim, spec.state_dim]  # whole on every rank
        self.in_proj = nn.Linear(dim, 2 * spec.channels, bias=bias, dtype=dtype, device=device)
        if spec.num_heads == 1:
            self.x_proj = nn.Linear(
                spec.channels, sum(self._widths), bias=False, dtype=dtype, device=device
            )
            self.dt_proj = nn.Linear(
                spec.dt_rank, spec.channels, bias=False, dtype=dtype, device=device
            )
        else:
            heads, width = spec.num_heads, spec.channels // spec.num_heads
            self.x_proj = HeadLinear(parameter(heads, width, sum(self._widths)), None)
            self.dt_proj = HeadLinear(parameter(heads, spec.dt_rank, width), None)
        self.out_proj = nn.Linear(spec.channels, dim, bias=bias, dtype=dtype, device=device)
        self.dt_norm, self.B_norm, self.C_norm = map(norm, self._widths)
        self.conv_weight = parameter(spec.channels, spec.conv_width)
        self.conv_bias = parameter(spec.channels) if conv_bias else None
        self.dt_bias = parameter(spec.channels)
        self.A_log = parameter(spec.channels, spec.state_dim)
        self.D = parameter(spec.channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the published models do: steps of 0.001 to 0.1, decay rates of 1 to N."""
        init_convolution(self.conv_weight, self.conv_bias)
        for projection in (self.x_proj, self.dt_proj):
            projection.reset_parameters()
        nn.init.uniform_(self.dt_bias, -7.0, -2.0)
        with torch.no_grad():
            places = range(1, self.spec.state_dim + 1)
            rates = torch.tensor(places, dtype=torch.float32, device=self.A_log.device)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        spec = self.spec
        mixed, z = columns(self.in_proj, x, [spec.channels] * 2)
        mixed = convolve(
            mixed, self.conv_weight, self.conv_bias, plan, cache, activation=spec.activation
        )
        dt, B, C = self._selected(mixed)

        def scan(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
            (x, dt, B), (C, z) = advancing, reading
            return selective_scan(
                *(x, dt, B, C, z, self.A_log, self.D, cache["state"]),
                *(at.cu_seqlens, at.initial_indices, at.state_indices),
                impl=plan.statics.impl("selective_scan"),
                dt_bias=self.dt_bias,
            )

        # Records of drafts hold dt before its bias.
        out: Tensor = self.out_proj(walk(scan, [mixed, dt, B], [C, z], plan, cache, STATE_RECORDS))
        return out

    def _selected(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project convolved x to steps [T, channels] without bias, and B and C [T, heads, N]."""
        if not isinstance(self.x_proj, HeadLinear):
            dt, B, C = columns(self.x_proj, mixed, self._widths)
            return self.dt_proj(self.dt_norm(dt)), self.B_norm(B)[:, None], self.C_norm(C)[:, None]
        selected = self.x_proj(mixed.unflatten(-1, (self.spec.num_heads, -1)))
        dt, B, C = selected.split(self._widths, dim=-1)
        steps = self.dt_proj(self.dt_norm(dt)).flatten(1)
        return steps, self.B_norm(B).contiguous(), self.C_norm(C).contiguous()

    def blocks(self) -> dict[str, Blocks]:
        """Say how the weights are divided.

        With one head, all channels contribute to ``[dt | B | C]``, whose parts are summed over
        ranks. Several heads are divided among ranks.
        """
        channels, heads = (self.spec.channels, 1), (self.spec.num_heads, 1)
        has_one = self.spec.num_heads == 1
        return {
            "in_proj": [channels] * 2,
            "x_proj": self.spec.channels if has_one else [heads],
            "dt_proj": [channels] if has_one else [heads],
            "out_proj": self.spec.channels,
            "conv_weight": [channels],
            "conv_bias": [channels],
            "dt_bias": [channels],
            "A_log": [channels],
            "D": [channels],
        }
