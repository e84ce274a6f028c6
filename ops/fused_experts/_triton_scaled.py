"""Experts whose weights have scales, in Triton: one kernel for both products, by a loader.

Pairs are grouped as ``_triton.py`` does it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_activation import NOT_ACTIVATED, activate, activated
from torch_hybrid.ops.fused_experts._triton_group import num_blocks, rows_of_block
from torch_hybrid.ops.fused_experts._triton_loader import Loader, Stored
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.launch import bind


def scaled_products(
    x: FusedExperts,
    order: Tensor,
    starts: Tensor,
    results: Tensor,
    *,
    loader: Loader,
    share: int,
    hidden: Tensor | None = None,
) -> None:
    """Fill ``results`` [P, D] with each pair's output of its expert, unweighted.

    Given ``hidden`` [P, I] activations, contiguous, it is the second product alone.
    """
    (gate_up, down), tile = loader.stored(x), loader.tile(x, share)
    blocks = num_blocks(x.num_pairs, x.num_experts, tile.block_m)
    options = {
        "order": order,
        "starts": starts,
        "E": x.num_experts,
        "BLOCK_E": triton.next_power_of_2(x.num_experts),
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": True,
    }

    def multiply(rows: Tensor, weight: Stored, out: Tensor, **given: Any) -> None:
        depth, width = rows.shape[1], out.shape[1]
        bind(_scaled_kernel, x, weight, loader, tile)[(blocks * triton.cdiv(width, tile.block_n),)](
            x=rows, weight=weight.numbers, out=out, K=depth, N=width, **given, **options
        )

    if hidden is None:
        hidden = x.x.new_empty(x.num_pairs, x.width)
        multiply(x.x, gate_up, hidden, ACTIVATES=True, **activated(x))
    multiply(hidden, down, results, stride_x=None, **NOT_ACTIVATED)


@triton.jit
def _scaled_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    stride_x: tl.tensor | None,  # of rows of tokens; None for those of pairs, one after the other
    ACTIVATES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N of N results of BLOCK_M pairs of one expert, which it ACTIVATES or not.

    Grid: blocks of pairs times blocks of N. A pipeline of STAGES loads BLOCK_K columns at a time.
    """
    NUM_COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    index_m = begin + tl.arange(0, BLOCK_M)
    mask_m = index_m < end
    pair = tl.load(order + index_m, mask=mask_m, other=0).to(tl.int64)
    first_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = index_n < N
    p_x = x + pair[:, None] * K if stride_x is None else x + (pair // TOP_K * stride_x)[:, None]
    if HAS_GATE:
        gate_rows = ROWS(weight, scales, expert, first_n, 0, 1 + HAS_GATE, N, K, BLOCK_N, FORM)
    rows = ROWS(weight, scales, expert, first_n, HAS_GATE, 1 + HAS_GATE, N, K, BLOCK_N, FORM)
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    lost_gate, acc, lost = gate, gate, gate
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < K), other=0.0)
        if HAS_GATE:
            gate, lost_gate = ADD(gate, lost_gate, gate_rows, b_x, first, K, FORM)
        acc, lost = ADD(acc, lost, rows, b_x, first, K, FORM)
    if HAS_GATE:
        gate = SCALE(gate, gate_rows, FORM)
    acc = SCALE(acc, rows, FORM)
    if ACTIVATES:
        acc = activate(gate, acc, HAS_GATE, LIMIT, SOFTCAPS)
    p_out = out + pair[None, :] * N + index_n[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
