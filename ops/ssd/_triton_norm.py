"""The norm by groups that ends a step in Triton, with its gate.

It begins while the launch before it ends, where a GPU can (PDL).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ssd.op_step_lightning import LightningStep
from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind

# What the outputs are gated by, and when.
SILU_BEFORE: tl.constexpr = tl.constexpr(0)
SILU_AFTER: tl.constexpr = tl.constexpr(1)
SIGMOID: tl.constexpr = tl.constexpr(2)


def launch_norm(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    x: SsdStep | LightningStep,
    *,
    gated_by: tl.constexpr,
    out: Tensor | None = None,
) -> None:
    """Normalise and gate outputs ``o``, in place or to ``out``."""
    num_tokens, inner = o.shape
    width = inner // x.norm_groups
    block = triton.next_power_of_2(width)
    bind(_norm_kernel, x)[(num_tokens * x.norm_groups,)](
        o=o,
        gate=gate,
        weight=weight,
        out=out,
        GROUPS=x.norm_groups,
        WIDTH=width,
        BLOCK=block,
        GATED_BY=gated_by.value,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _norm_kernel(
    o: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor | None,
    norm_eps: tl.tensor,
    num_seqs: tl.tensor,
    stride_gate: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED_BY: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise and gate one group of a token's channels. Grid: tokens times groups.

    Padding becomes 0 in ``out``; in place it stays 0, whatever its gates are.
    """
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < WIDTH
    mask = inside & (token < tl.load(cu_seqlens + num_seqs))
    channel = tl.program_id(0) % GROUPS * WIDTH + index
    b_z = tl.load(gate + token * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if GATED_BY != SIGMOID:
        silu = b_z / (1.0 + tl.exp(-b_z))
    follow(EARLY)
    row = token * GROUPS * WIDTH + channel
    b_o = tl.load(o + row, mask=mask, other=0.0).to(tl.float32)
    if GATED_BY == SILU_BEFORE:
        b_o *= silu
    b_o = b_w * (b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) / WIDTH + norm_eps))
    if GATED_BY == SILU_AFTER:
        b_o *= silu
    elif GATED_BY == SIGMOID:
        b_o = b_o / (1.0 + tl.exp(-b_z))
    if out is None:
        tl.store(o + row, b_o.to(o.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row, b_o.to(out.dtype.element_ty), mask=inside)
