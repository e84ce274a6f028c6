# mypy: disable-error-code="untyped-decorator"
"""Experts of integers in Triton: widened in registers, so that nothing else is rounded.

Pairs are grouped as ``_triton.py`` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.integers import INT4, depth_of, group_of, has_zeros
from torch_hybrid.ops.fused_experts._triton_activation import activate
from torch_hybrid.ops.fused_experts._triton_group import num_blocks, rows_of_block
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.integers import chunk_of, few_products, rows_at, wide_tile
from torch_hybrid.ops.triton.products import dot

_FEW_BLOCK_N = 4  # rows of weights that a program reads side by side, for few tokens
_FEW_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """``block_n`` rows of weights times a block of ``block_m`` pairs, ``block_k`` columns at a
    time. Decided by shapes alone, so that a captured graph serves any choice of experts."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_pairs: int, num_experts: int, like: Tensor, *, group: int) -> Tile:
        """For so many pairs of tokens like these, and groups of so many numbers."""
        # Outside the tensor cores, on operands in registers; a tile's products are one chain.
        if like.dtype == torch.float32:
            return cls(block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=2)
        share = triton.cdiv(num_pairs, num_experts)
        # Where tensor cores read memory, sums of 128 pairs fit registers: weights are widened once.
        if share > 64 and is_hopper(like.device):
            block_n, num_warps = (64, 4) if group == 128 else (128, 8)
            return cls(block_m=128, block_n=block_n, block_k=128, num_warps=num_warps, num_stages=3)
        # Most experts have less than twice their share: then one block holds all their pairs.
        block_m = min(max(triton.next_power_of_2(2 * share), 16), 64)
        return cls(block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=3)


def _group(weight: Tensor, scales: Tensor) -> int:
    """How many numbers share a scale, 0 where a row has one."""
    return group_of(weight, scales) if weight.dtype == INT4 else 0


def _stored(weight: Tensor, scales: Tensor) -> dict[str, int | bool]:
    """How kernels read a weight."""
    return {"GROUP": _group(weight, scales), "ZEROS": has_zeros(weight, scales)}


def _few_block(weight: Tensor) -> int:
    """Columns that a program reads at once, for few tokens."""
    num_bytes = min(_FEW_BYTES, max(16, triton.next_power_of_2(weight.shape[-1])))
    return int(num_bytes * depth_of(weight) // weight.shape[-1])


def integer_few_tokens(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    *,
    gate_up_scales: Tensor,
    down_scales: Tensor,
    activation: str,
    limit: float | None,
    softcaps: tuple[float, ...] | None,
) -> None:
    """Fill ``out`` with what ``torch_hybrid::fused_experts`` returns."""
    num_tokens, top_k = expert_ids.shape
    num_experts, dim, width = *down.shape[:2], depth_of(down)
    hidden = x.new_empty(num_tokens * top_k, width)
    _integer_hidden_kernel[(num_tokens * top_k, triton.cdiv(width, _FEW_BLOCK_N))](
        x,
        expert_ids,
        gate_up,
        gate_up_scales,
        hidden,
        x.stride(0),
        HAS_GATE=activation == "silu",
        LIMIT=limit,
        SOFTCAPS=softcaps,
        TOP_K=top_k,
        E=num_experts,
        D=dim,
        I=width,
        **_stored(gate_up, gate_up_scales),
        BLOCK_N=_FEW_BLOCK_N,
        BLOCK_K=_few_block(gate_up),
        num_warps=4,
        enable_fp_fusion=True,
    )
    _integer_out_kernel[(num_tokens, triton.cdiv(dim, _FEW_BLOCK_N))](
        hidden,
        expert_ids,
        expert_weights,
        down,
        down_scales,
        out,
        TOP_K=top_k,
        E=num_experts,
        D=dim,
        I=width,
        **_stored(down, down_scales),
        BLOCK_N=_FEW_BLOCK_N,
        BLOCK_K=_few_block(down),
        num_warps=4,
        enable_fp_fusion=True,
    )


def integer_products(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    results: Tensor,
    *,
    gate_up_scales: Tensor,
    down_scales: Tensor,
    top_k: int,
    activation: str,
    limit: float | None,
    softcaps: tuple[float, ...] | None,
) -> None:
    """Fill ``results`` [P, D] with what the experts give for each pair, unweighted."""
    num_experts, dim, width = *down.shape[:2], depth_of(down)
    num_pairs = results.shape[0]
    hidden = x.new_empty(num_pairs, width)
    tile = Tile.of(num_pairs, num_experts, x, group=_group(down, down_scales))
    blocks = num_blocks(num_pairs, num_experts, tile.block_m)
    sizes = {
        "E": num_experts,
        "D": dim,
        "I": width,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
    }
    _integer_gate_up_kernel[(blocks * triton.cdiv(width, tile.block_n),)](
        x,
        gate_up,
        gate_up_scales,
        hidden,
        order,
        starts,
        x.stride(0),
        HAS_GATE=activation == "silu",
        LIMIT=limit,
        SOFTCAPS=softcaps,
        TOP_K=top_k,
        **_stored(gate_up, gate_up_scales),
        **sizes,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    _integer_down_kernel[(blocks * triton.cdiv(dim, tile.block_n),)](
        hidden,
        down,
        down_scales,
        results,
        order,
        starts,
        **_stored(down, down_scales),
        **sizes,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


@triton.jit
def _row_scale(p_scale: tl.tensor, mask: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Load the factors of rows' sums: INT8's scales, 1 for INT4, whose tiles are scaled already."""
    scale = tl.full(mask.shape, 1.0, dtype=tl.float32)
    if GROUP == 0:
        scale = tl.load(p_scale, mask=mask, other=0.0)
    return scale


@triton.jit
def _integer_hidden_kernel(
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
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of one pair of a token and an INT8 or INT4 expert.

    Grid: (pairs, I / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns, widened in
    registers, outside the tensor cores. Registers: 16 partial sums for each row and chunk.
    """
    pair = tl.program_id(0)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if expert == E:
        return
    index_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    p_x = x + (pair // TOP_K).to(tl.int64) * stride_x
    row = expert * ((1 + HAS_GATE) * I) + index_n
    p_gate, p_gate_scale = rows_at(gate_up, scales, row, 0, D, GROUP, ZEROS)
    p_up, p_up_scale = rows_at(gate_up, scales, row + HAS_GATE * I, 0, D, GROUP, ZEROS)
    gate = tl.zeros([BLOCK_N, BLOCK_K // chunk_of(GROUP), 16], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // chunk_of(GROUP), 16], dtype=tl.float32)
    for first in range(0, D, BLOCK_K):
        if HAS_GATE:
            gate += few_products(p_gate, p_gate_scale, p_x, first, mask_n, D, GROUP, ZEROS, BLOCK_K)
        up += few_products(p_up, p_up_scale, p_x, first, mask_n, D, GROUP, ZEROS, BLOCK_K)
    b_gate = tl.sum(tl.sum(gate, 2), 1) * _row_scale(p_gate_scale, mask_n, GROUP)
    b_up = tl.sum(tl.sum(up, 2), 1) * _row_scale(p_up_scale, mask_n, GROUP)
    b_hidden = activate(b_gate, b_up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair.to(tl.int64) * I + index_n
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask_n)


@triton.jit
def _integer_out_kernel(
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
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of one token, the weighted sum over its INT8 or INT4 experts.

    Grid: (tokens, D / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns, widened in
    registers, outside the tensor cores; the loop runs over all experts' columns.
    """
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0)
    index_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K // chunk_of(GROUP), 16], dtype=tl.float32)
    for step in range(TOP_K * STEPS):
        pair = token * TOP_K + step // STEPS
        expert = tl.load(expert_ids + pair).to(tl.int64)
        mask_n = (index_n < D) & (expert < E)
        p_w, p_scale = rows_at(down, scales, expert * D + index_n, 0, I, GROUP, ZEROS)
        weight = tl.where(expert < E, tl.load(expert_weights + pair).to(tl.float32), 0.0)
        scale = _row_scale(p_scale, mask_n, GROUP) * weight
        p_x = hidden + pair.to(tl.int64) * I
        first = step % STEPS * BLOCK_K
        products = few_products(p_w, p_scale, p_x, first, mask_n, I, GROUP, ZEROS, BLOCK_K)
        # Of an expert that is none, hidden activations were not written.
        acc += tl.where(expert < E, products * scale[:, None, None], 0.0)
    b_out = tl.sum(tl.sum(acc, 2), 1)
    p_out = out + token.to(tl.int64) * D + index_n
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=index_n < D)


@triton.jit
def _add_product(
    acc: tl.tensor, lost: tl.tensor, w: tl.tensor, x: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Compute ``acc + w @ x^T`` of a widened tile w.

    In float32, compensate what the sum loses to rounding (Kahan's ``lost``).
    """
    if x.dtype == tl.float32:
        part = dot(w, tl.trans(x), tl.zeros_like(acc)) - lost
        total = acc + part
        lost = (total - acc) - part
        acc = total
    else:
        acc = dot(w, tl.trans(x), acc)
    return acc, lost


@triton.jit
def _integer_gate_up_kernel(
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
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of BLOCK_M pairs of one expert: a grouped GEMM, activated.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_N by BLOCK_M, in steps of BLOCK_K columns; INT8 or INT4 is widened in registers. Pipeline:
    STAGES tiles.
    """
    NUM_COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    index_m = begin + tl.arange(0, BLOCK_M)
    mask_m = index_m < end
    pair = tl.load(order + index_m, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    p_x = x + (pair // TOP_K * stride_x)[:, None]
    row = expert.to(tl.int64) * ((1 + HAS_GATE) * I) + index_n
    p_gate, p_gate_scale = rows_at(gate_up, scales, row, 0, D, GROUP, ZEROS)
    p_up, p_up_scale = rows_at(gate_up, scales, row + HAS_GATE * I, 0, D, GROUP, ZEROS)
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    lost_gate, up, lost_up = gate, gate, gate
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < D), other=0.0)
        if HAS_GATE:
            b_w = wide_tile(
                p_gate, p_gate_scale, first, mask_n, D, GROUP, ZEROS, BLOCK_K, b_x.dtype
            )
            gate, lost_gate = _add_product(gate, lost_gate, b_w, b_x)
        b_w = wide_tile(p_up, p_up_scale, first, mask_n, D, GROUP, ZEROS, BLOCK_K, b_x.dtype)
        up, lost_up = _add_product(up, lost_up, b_w, b_x)
    gate *= _row_scale(p_gate_scale, mask_n, GROUP)[:, None]
    up *= _row_scale(p_up_scale, mask_n, GROUP)[:, None]
    b_hidden = activate(gate, up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair[None, :] * I + index_n[:, None]
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def _integer_down_kernel(
    hidden: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of BLOCK_M pairs of one INT8 or INT4 expert: a grouped GEMM.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_N by BLOCK_M, in steps of BLOCK_K columns, widened in registers. Pipeline: STAGES tiles.
    """
    NUM_COLUMNS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    index_m = begin + tl.arange(0, BLOCK_M)
    mask_m = index_m < end
    pair = tl.load(order + index_m, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < D
    p_x = hidden + pair[:, None] * I
    row = expert.to(tl.int64) * D + index_n
    p_w, p_scale = rows_at(down, scales, row, 0, I, GROUP, ZEROS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    lost = acc
    for first in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < I), other=0.0)
        b_w = wide_tile(p_w, p_scale, first, mask_n, I, GROUP, ZEROS, BLOCK_K, b_x.dtype)
        acc, lost = _add_product(acc, lost, b_w, b_x)
    acc *= _row_scale(p_scale, mask_n, GROUP)[:, None]
    p_out = results + pair[None, :] * D + index_n[:, None]
    tl.store(p_out, acc.to(results.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
