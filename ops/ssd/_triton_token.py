"""Arithmetic of one token that the kernels of steps share."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.decays import softplus


@triton.jit
def step_size(x_dt: tl.tensor, dt_min: tl.tensor, dt_max: tl.tensor) -> tl.tensor:
    """Compute a head's step size in Mamba2: a clamped softplus."""
    return tl.clamp(softplus(x_dt), dt_min, dt_max, tl.PropagateNan.ALL)


@triton.jit
def fixed_decay(slope: tl.tensor) -> tl.tensor:
    """Compute a head's decay in lightning attention, in float64: every token has the same, so an
    error would add up."""
    return tl.exp(-slope.to(tl.float64)).to(tl.float32)


@triton.jit
def gated(b_o: tl.tensor, b_z: tl.tensor | None) -> tl.tensor:
    """Gate outputs, if there is a gate, and round to their dtype."""
    if b_z is not None:
        b_o = (b_o.to(tl.float32) * b_z / (1.0 + tl.exp(-b_z))).to(b_o.dtype)
    return b_o
