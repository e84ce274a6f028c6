"""Twins of mixers of Mamba2's state space duality."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import silu

from torch_hybrid.functional import ssd
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import (
    Submodule,
    Twin,
    as_work,
    by_head,
    convolved,
    gated_norm,
)


class Mamba2(
    Twin,
    of=(
        "Mamba2Mixer",
        "BambaMixer",
        "GraniteMoeHybridMambaLayer",
        "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    ),
):
    """State space duality behind a short convolution, as in Mamba2, Bamba and Granite 4."""

    A_log: Tensor
    D: Tensor
    activation: Literal["silu"]
    conv1d: nn.Conv1d
    conv_dim: int
    dt_bias: Tensor
    head_dim: int
    in_proj: Submodule
    intermediate_size: int
    norm: Submodule
    num_heads: int
    out_proj: Submodule
    ssm_state_size: int
    time_step_limit: tuple[float, float]

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        widths = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, xBC, dt = self.project(x).split(widths, -1)
        xBC = convolved(self.conv1d, xBC, packing, self.activation)
        group_width = (self.conv_dim - self.intermediate_size) // 2
        v, B, C = xBC.split([self.intermediate_size, group_width, group_width], -1)
        B, C = (by_head(each, self.ssm_state_size) for each in (B, C))
        y, _ = ssd(
            *(by_head(v, self.head_dim), dt, -as_work(self.A_log).exp(), B, C),
            *(self.D, self.dt_bias, packing),
            dt_limit=self.time_step_limit,
            output_final_state=False,
        )
        return self.out_proj(self.gated(y.flatten(1), gate).to(x.dtype))

    def project(self, x: Tensor) -> Tensor:
        """Project tokens [T, D] to gates, inputs of the convolution, and steps."""
        return self.in_proj(x)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate outputs [T, H * P]."""
        return gated_norm(self.norm, y, gate)


class FalconH1Mamba2(Mamba2, of=("FalconH1Mixer",)):
    """State space duality as in Falcon-H1: multipliers, and a norm that a model may lack."""

    mamba_rms_norm: bool
    mup_vector: Tensor
    ssm_in_multiplier: float

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x * self.ssm_in_multiplier) * self.mup_vector[0]

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(self.norm, y, gate) if self.mamba_rms_norm else y * silu(gate)
