"""The experts in Triton for few tokens: no grouping, since few pairs share an expert.

Each weight is multiplied as it comes from memory, read by a format's loader; where two tokens have
an expert in common, its weights come from the L2 cache the second time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_activation import activate, activated, sizes
from torch_hybrid.ops.fused_experts._triton_loader import Loader
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind


def multiply_few(x: FusedExperts, loader: Loader) -> Tensor:
    """Launch a kernel for the hidden activations of all pairs, and one for tokens' outputs."""
    gate_up, down = loader.stored(x)
    out = x.x.new_empty(x.x.shape)
    hidden = x.x.new_empty(x.num_pairs, x.width)
    blocks = triton.cdiv(x.width, gate_up.few.rows)
    bind(_hidden_kernel, x, gate_up, loader)[(x.num_pairs, blocks)](
        gate_up=gate_up.numbers,
        hidden=hidden,
        **activated(x),
        **sizes(x),
        **gate_up.few.constants(),
    )
    bind(_out_kernel, x, down)[(len(out), triton.cdiv(x.dim, down.few.rows))](
        hidden=hidden,
        down=down.numbers,
        out=out,
        MULTIPLY=loader.multiply_hidden,
        **sizes(x),
        **down.few.constants(),
    )
    return out


@triton.jit
def _sum_columns(products: tl.tensor) -> tl.tensor:
    """Sum [N, ...] products of rows to [N]."""
    if len(products.shape) == 3:
        products = tl.sum(products, 2)
    return tl.sum(products, 1)


@triton.jit
def _hidden_kernel(
    x: tl.tensor,
    expert_ids: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    ROWS: tl.constexpr,
    MULTIPLY: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of one pair; grid: (pairs, blocks of I)."""
    follow(EARLY)
    pair = tl.program_id(0)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if expert == E:
        return
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    p_x = x + (pair // TOP_K).to(tl.int64) * stride_x
    gate_rows = ROWS(gate_up, scales, expert, first_n, 0, 1 + HAS_GATE, I, D, BLOCK_N, FORM)
    up_rows = ROWS(gate_up, scales, expert, first_n, HAS_GATE, 1 + HAS_GATE, I, D, BLOCK_N, FORM)
    gate = tl.zeros(SHAPE, dtype=tl.float32)
    up = tl.zeros(SHAPE, dtype=tl.float32)
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        if HAS_GATE:
            gate += MULTIPLY(gate_rows, p_x, first, D, BLOCK_K, FORM)
        up += MULTIPLY(up_rows, p_x, first, D, BLOCK_K, FORM)
    b_gate = SCALE(_sum_columns(gate), gate_rows, FORM)
    b_up = SCALE(_sum_columns(up), up_rows, FORM)
    b_hidden = activate(b_gate, b_up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair.to(tl.int64) * I + index_n
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=index_n < I)


@triton.jit
def _out_kernel(
    hidden: tl.tensor,
    expert_ids: tl.tensor,
    expert_weights: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    MULTIPLY: tl.constexpr,
    FORM: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of one token, weighted sums of k experts; grid: (T, blocks of D)."""
    follow(EARLY)
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0)
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    acc = tl.zeros(SHAPE, dtype=tl.float32)
    for step in tl.range(0, TOP_K * STEPS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        pair = token * TOP_K + step // STEPS
        expert = tl.load(expert_ids + pair).to(tl.int64)
        weight = tl.where(expert < E, tl.load(expert_weights + pair).to(tl.float32), 0.0)
        choice = (pair, expert, expert < E, weight)
        first = step % STEPS * BLOCK_K
        acc += MULTIPLY(down, scales, hidden, choice, first_n, first, D, I, BLOCK_N, BLOCK_K, FORM)
    b_out = _sum_columns(acc)
    p_out = out + token.to(tl.int64) * D + index_n
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=index_n < D)
