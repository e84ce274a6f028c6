"""Implementations "triton" and "triton_invariant": launches of ``_triton_step.py``,
``_triton_step_open.py`` and ``_triton_step_extend.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._triton_step import Rule, launch_step
from torch_hybrid.ops.delta_rule._triton_step_extend import launch_extend
from torch_hybrid.ops.delta_rule._triton_step_open import launch_open_step
from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep


def kimi_delta_step(x: KimiDeltaStep, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::kimi_delta_step``; invariant: any number of tokens, one by one."""
    rule = Rule(
        norm=_gated_norm, norm_eps=x.norm_eps, lower_bound=x.gate_lower_bound, by_channel=True
    )
    if x.chunk is not None:
        return launch_open_step(x, rule)
    return launch_extend(x, rule) if is_invariant else launch_step(x, rule)


@triton.jit
def _gated_norm(
    b_o: tl.tensor,
    b_w: tl.tensor,
    b_z: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Normalise rows and gate them by a sigmoid, in float32: ``dtype`` is not used."""
    b_w = b_w.to(tl.float32)[None, :]
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * b_w
    return b_o / (1.0 + tl.exp(-b_z))
