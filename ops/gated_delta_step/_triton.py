# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of both steps: the launches of ``ops/triton/delta_step.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.delta_extend import launch_extend
from torch_hybrid.ops.triton.delta_step import Rule, launch_step


def gated_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
    gate: str = "silu",
) -> Tensor:
    """Launcher of ``torch_hybrid::gated_delta_step``."""
    rule = _rule(scale, beta_scale, norm_eps, gate)
    return launch_step(*tensors, activation=activation, rule=rule)


# Of ``torch_hybrid::gated_delta_verify``, whose tensors end with records and counts.
gated_delta_verify = gated_delta_step


def invariant_gated_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
    gate: str = "silu",
) -> Tensor:
    """Implementation "triton_invariant": any number of tokens, one after the other."""
    rule = _rule(scale, beta_scale, norm_eps, gate)
    return launch_extend(*tensors, activation=activation, rule=rule)


def _rule(scale: float, beta_scale: float, norm_eps: float, gate: str) -> Rule:
    norm = _norm_times_silu if gate == "silu" else _norm_times_sigmoid
    return Rule(norm=norm, norm_eps=norm_eps, scale=scale, beta_scale=beta_scale)


@triton.jit
def _norm(
    b_o: tl.tensor, b_w: tl.tensor, eps: tl.tensor, V: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Rows over their root mean squares, rounded, then weighted, rounded."""
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    b_o = b_o.to(dtype).to(tl.float32) * b_w.to(tl.float32)[None, :]
    if b_w.dtype == dtype:
        b_o = b_o.to(dtype).to(tl.float32)
    return b_o


@triton.jit
def _norm_times_silu(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Rows normed, and gated by a silu."""
    return _norm(b_o, b_w, eps, V, dtype) * b_z / (1.0 + tl.exp(-b_z))


@triton.jit
def _norm_times_sigmoid(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Rows normed, and gated by a sigmoid."""
    return _norm(b_o, b_w, eps, V, dtype) / (1.0 + tl.exp(-b_z))
