# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of both steps: the launches of ``ops/triton/delta_step.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.delta_extend import launch_extend
from torch_hybrid.ops.triton.delta_step import Rule, launch_step


def kimi_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    gate_lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::kimi_delta_step``."""
    rule = _rule(scale, gate_lower_bound, norm_eps)
    return launch_step(*tensors, activation=activation, rule=rule)


# Of ``torch_hybrid::kimi_delta_verify``, whose tensors end with records and counts.
kimi_delta_verify = kimi_delta_step


def invariant_kimi_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    gate_lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """Implementation "triton_invariant": any number of tokens, one after the other."""
    rule = _rule(scale, gate_lower_bound, norm_eps)
    return launch_extend(*tensors, activation=activation, rule=rule)


def _rule(scale: float, gate_lower_bound: float | None, norm_eps: float) -> Rule:
    return Rule(
        norm=_gated_norm,
        norm_eps=norm_eps,
        scale=scale,
        lower_bound=gate_lower_bound,
        by_channel=True,
    )


@triton.jit
def _gated_norm(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Rows over their root mean squares, weighted and gated; ``dtype`` rounds nothing."""
    b_w = b_w.to(tl.float32)[None, :]
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * b_w
    return b_o / (1.0 + tl.exp(-b_z))
