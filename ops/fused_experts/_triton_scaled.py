"""Experts whose weights have scales, in Triton: two kernels, which read weights by a loader.

Pairs are grouped as ``_triton.py`` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_activation import activate, activated, sizes
from torch_hybrid.ops.fused_experts._triton_group import num_blocks, rows_of_block
from torch_hybrid.ops.fused_experts._triton_loader import Loader, Stored
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.launch import bind

_ANY_SHARE = 32  # of tiles for any number of pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of ``block_n`` rows of weights and ``block_m`` pairs, ``block_k`` columns at a time.

    Shapes alone decide it, so that a captured graph serves any choice of experts.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def share_of(x: FusedExperts, *, is_invariant: bool = False) -> int:
    """Count the pairs of an expert, for which a tile is chosen; invariant, one for any number."""
    return _ANY_SHARE if is_invariant else triton.cdiv(x.num_pairs, x.num_experts)


def scaled_products(
    x: FusedExperts,
    loader: Loader,
    weights: tuple[Stored, Stored],
    tile: Tile,
    grouped: tuple[Tensor, Tensor],
    results: Tensor,
    hidden: Tensor | None,
) -> None:
    """Fill ``results`` [P, D] with each pair's output of its expert, unweighted.

    Given ``hidden`` [P, I] activations, contiguous, it is the second product alone.
    """
    gate_up, down = weights
    blocks = num_blocks(x.num_pairs, x.num_experts, tile.block_m)
    order, starts = grouped
    options = {
        "order": order,
        "starts": starts,
        **sizes(x),
        "BLOCK_E": triton.next_power_of_2(x.num_experts),
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": True,
    }
    if hidden is None:
        hidden = x.x.new_empty(x.num_pairs, x.width)
        programs = blocks * triton.cdiv(x.width, tile.block_n)
        bind(_scaled_gate_up_kernel, x, gate_up, loader, tile)[(programs,)](
            gate_up=gate_up.numbers, hidden=hidden, **activated(x), **options
        )
    programs = blocks * triton.cdiv(x.dim, tile.block_n)
    bind(_scaled_down_kernel, x, down, loader, tile)[(programs,)](
        hidden=hidden, down=down.numbers, results=results, **options
    )


@triton.jit
def _scaled_gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of BLOCK_M pairs of one expert.

    Grid: blocks of pairs times blocks of I. A pipeline of STAGES loads BLOCK_K columns at a time.
    """
    NUM_COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    index_m = begin + tl.arange(0, BLOCK_M)
    mask_m = index_m < end
    pair = tl.load(order + index_m, mask=mask_m, other=0).to(tl.int64)
    first_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    p_x = x + (pair // TOP_K * stride_x)[:, None]
    gate_rows = ROWS(gate_up, scales, expert, first_n, 0, 1 + HAS_GATE, I, D, BLOCK_N, FORM)
    up_rows = ROWS(gate_up, scales, expert, first_n, HAS_GATE, 1 + HAS_GATE, I, D, BLOCK_N, FORM)
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    lost_gate, up, lost_up = gate, gate, gate
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < D), other=0.0)
        if HAS_GATE:
            gate, lost_gate = ADD(gate, lost_gate, gate_rows, b_x, first, D, FORM)
        up, lost_up = ADD(up, lost_up, up_rows, b_x, first, D, FORM)
    gate, up = SCALE(gate, gate_rows, FORM), SCALE(up, up_rows, FORM)
    b_hidden = activate(gate, up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair[None, :] * I + index_n[:, None]
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def _scaled_down_kernel(
    hidden: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of BLOCK_M pairs of one expert.

    Grid: blocks of pairs times blocks of D. A pipeline of STAGES loads BLOCK_K columns at a time.
    """
    NUM_COLUMNS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    index_m = begin + tl.arange(0, BLOCK_M)
    mask_m = index_m < end
    pair = tl.load(order + index_m, mask=mask_m, other=0).to(tl.int64)
    first_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = index_n < D
    p_x = hidden + pair[:, None] * I
    rows = ROWS(down, scales, expert, first_n, 0, 1, D, I, BLOCK_N, FORM)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    lost = acc
    for first in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < I), other=0.0)
        acc, lost = ADD(acc, lost, rows, b_x, first, I, FORM)
    acc = SCALE(acc, rows, FORM)
    p_out = results + pair[None, :] * D + index_n[:, None]
    tl.store(p_out, acc.to(results.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
