"""Implementations "triton" and "triton_invariant": launches of ``_triton_step.py``,
``_triton_step_open.py`` and ``_triton_step_extend.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._triton_step import Rule, launch_step
from torch_hybrid.ops.delta_rule._triton_step_extend import launch_extend
from torch_hybrid.ops.delta_rule._triton_step_open import launch_open_step
from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep


def gated_delta_step(x: GatedDeltaStep, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::gated_delta_step``; invariant: any number of tokens, one by one."""
    rule = Rule(
        norm=_norm_times_silu if x.gate == "silu" else _norm_times_sigmoid,
        norm_eps=x.norm_eps,
        beta_scale=x.beta_scale,
    )
    if x.chunk is not None:
        return launch_open_step(x, rule)
    return launch_extend(x, rule) if is_invariant else launch_step(x, rule)


@triton.jit
def _norm(
    b_o: tl.tensor, b_w: tl.tensor, eps: tl.tensor, V: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Divide rows by their RMS, round, and multiply by the weight; a weight in ``dtype`` rounds
    again."""
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
    """Normalise rows, and gate them by a silu."""
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
    """Normalise rows, and gate them by a sigmoid."""
    return _norm(b_o, b_w, eps, V, dtype) / (1.0 + tl.exp(-b_z))
