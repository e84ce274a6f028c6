"""Twins of mixers of Mamba's selective scan."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_hybrid.functional import selective_scan
from torch_hybrid.packing import Packing
from torch_hybrid.training.linear import OwnLinear, linear
from torch_hybrid.training.mixers.twin import Submodule, Twin, as_work, by_head, convolved


class Mamba(Twin, of=("MambaMixer",)):
    """Selective scan behind a short convolution."""

    A_log: Tensor
    D: Tensor
    activation: Literal["silu"]
    conv1d: nn.Conv1d
    dt_proj: Any
    in_proj: Submodule
    out_proj: Submodule
    ssm_state_size: int
    time_step_rank: int
    x_proj: Submodule

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]; layers hand down a mask alone, which may be a packing."""
        if isinstance(mask := options.get("attention_mask"), Packing):
            packing = mask
        return super().forward(hidden_states, *args, packing=packing, **options)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        x, gate = self.project(x)
        x = convolved(self.conv1d, x, packing, self.activation)
        dt, dt_bias, B, C = self.select(x)
        dt, B, C = dt.to(x.dtype), B.to(x.dtype), C.to(x.dtype)
        A, D = -as_work(self.A_log).exp().view(-1, self.ssm_state_size), self.D.flatten()
        y, _ = selective_scan(
            *(x, dt, A, B, C, D, gate), dt_bias, packing, output_final_state=False
        )
        return self.out_proj(y)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project tokens [T, D] to inputs and gates [T, E]."""
        return self.in_proj(x).chunk(2, -1)

    def select(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Compute step sizes [T, E], their bias, and B and C [T, 1, N]."""
        widths = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, B, C = self.normalised(*self.x_proj(x).split(widths, -1))
        if type(self.dt_proj) in (nn.Linear, OwnLinear):  # then no sum with the bias is rounded
            return linear(dt, self.dt_proj.weight), self.dt_proj.bias, B[:, None], C[:, None]
        return self.dt_proj(dt), None, B[:, None], C[:, None]

    def normalised(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise what selects, where a family does."""
        return dt, B, C


class NormedMamba(Mamba, of=("FalconMambaMixer", "JambaMambaMixer")):
    """Selective scan as in Falcon-Mamba and Jamba: with norms of what selects."""

    b_layernorm: Submodule
    c_layernorm: Submodule
    dt_layernorm: Submodule

    def normalised(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)


class ZambaMamba(Mamba, of=("ZambaMambaMixer",)):
    """Selective scan of several heads, each with projections of its own, as in Zamba."""

    dt_proj_bias: Tensor
    dt_proj_weight: Tensor
    mamba_head_dim: int
    x_proj_weight: Tensor

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project tokens to inputs and gates, which a projection has side by side."""
        inputs, gate = self.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return inputs.contiguous(), gate.contiguous()

    def select(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Compute step sizes [T, E], their bias, and B and C [T, H, N] of each head."""
        widths = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        heads = by_head(x, self.mamba_head_dim).transpose(0, 1)
        dt, B, C = torch.bmm(heads, self.x_proj_weight.mT).split(widths, -1)
        dt = torch.bmm(dt, self.dt_proj_weight.mT).transpose(0, 1).flatten(1)
        B, C = (each.transpose(0, 1).contiguous() for each in (B, C))
        return dt, self.dt_proj_bias.flatten(), B, C
