# mypy: disable-error-code="untyped-decorator"
"""FP8 experts in Triton; each sum of 128 products is scaled in float32.

Weights are widened in registers. Or they are multiplied as they are: then tokens and hidden
activations are rounded to FP8 as they are loaded. Pairs are grouped as in ``_triton.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.fused_experts._triton_activation import activate
from torch_hybrid.ops.fused_experts._triton_group import num_blocks, rows_of_block
from torch_hybrid.ops.triton.fp8 import fp8_product, readable, widen

_FEW_BLOCK_N = 16  # rows of weights that a program reads side by side, for few tokens
_FEW_BLOCK_K = 512
_FEW_STAGES = 1  # measured: 23 us of one token, 27 with 3
_FEW_PAIRS = 128  # up to so many, programs have half of the rows of weights, and are twice as many
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """``block_n`` rows of weights times a block of ``block_m`` pairs, ``block_k`` columns at a
    time. Decided by shapes alone, so that a captured graph serves any choice of experts.

    ``block_n`` and ``block_k`` divide 128: there is one scale for each of gate and up.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_pairs: int, num_experts: int, dtype: torch.dtype, *, rounds: bool) -> Tile:
        """For so many pairs, of tokens of that dtype or rounded to 8 bits."""
        if (
            dtype == torch.float32 and not rounds
        ):  # outside the tensor cores, on operands in registers
            return cls(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
        # Most experts have less than twice their share: then one block holds all their pairs.
        rows = triton.next_power_of_2(2 * triton.cdiv(num_pairs, num_experts))
        if rounds and rows <= 32 and num_pairs > _FEW_PAIRS:
            num_warps = 4 if rows <= 16 else 8
            return cls(
                block_m=max(rows, 16), block_n=128, block_k=128, num_warps=num_warps, num_stages=3
            )
        if rows <= 32:
            block_m = max(rows, 16)
            return cls(block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=3)
        if rounds:
            return cls(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=3)
        return cls(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3)


def fp8_few_tokens(
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
    num_experts, dim, width = down.shape
    hidden = x.new_empty(num_tokens * top_k, width)
    _fp8_hidden_kernel[(num_tokens * top_k, triton.cdiv(width, _FEW_BLOCK_N))](
        x,
        expert_ids,
        readable(gate_up),
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
        BLOCK_N=_FEW_BLOCK_N,
        BLOCK_K=min(_FEW_BLOCK_K, triton.next_power_of_2(dim)),
        STAGES=_FEW_STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )
    _fp8_out_kernel[(num_tokens, triton.cdiv(dim, _FEW_BLOCK_N))](
        hidden,
        expert_ids,
        expert_weights,
        readable(down),
        down_scales,
        out,
        TOP_K=top_k,
        E=num_experts,
        D=dim,
        I=width,
        BLOCK_N=_FEW_BLOCK_N,
        BLOCK_K=min(_FEW_BLOCK_K, triton.next_power_of_2(width)),
        STAGES=_FEW_STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )


def fp8_products(
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
    rounds: bool = False,
) -> None:
    """Fill ``results`` [P, D] with what the experts give for each pair, unweighted.

    With ``rounds``, tokens and hidden activations are rounded to 8 bits.
    """
    num_experts, dim, width = down.shape
    num_pairs = results.shape[0]
    hidden = x.new_empty(num_pairs, width)
    tile = Tile.of(num_pairs, num_experts, x.dtype, rounds=rounds)
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
        "ROUNDS": rounds,
    }
    _fp8_gate_up_kernel[(blocks * triton.cdiv(width, tile.block_n),)](
        x,
        readable(gate_up),
        gate_up_scales,
        hidden,
        order,
        starts,
        x.stride(0),
        HAS_GATE=activation == "silu",
        LIMIT=limit,
        SOFTCAPS=softcaps,
        TOP_K=top_k,
        **sizes,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    _fp8_down_kernel[(blocks * triton.cdiv(dim, tile.block_n),)](
        hidden,
        readable(down),
        down_scales,
        results,
        order,
        starts,
        **sizes,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


@triton.jit
def _fp8_hidden_kernel(
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of one pair of a token and an FP8 expert, by widened
    weights.

    Grid: (pairs, I / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns, outside the tensor
    cores. Pipeline: STAGES tiles. Registers: a partial sum for each element, for gate and for up.
    """
    HIGH: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    pair = tl.program_id(0)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if expert == E:
        return
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < I)[:, None]
    p_x = x + (pair // TOP_K).to(tl.int64) * stride_x
    p_w = gate_up + expert * ((1 + HAS_GATE) * I * D) + index_n[:, None] * D
    p_scale = scales + (expert * ((1 + HAS_GATE) * HIGH) + first_n // _BLOCK) * WIDE
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        k = first + index_k
        mask_w = mask_n & (k < D)[None, :]
        b_x = tl.load(p_x + k, mask=k < D, other=0.0).to(tl.float32)
        if HAS_GATE:
            scale = tl.load(p_scale + k // _BLOCK, mask=k < D, other=0.0)
            b_w = tl.load(p_w + k[None, :], mask=mask_w, other=0.0)
            gate += widen(b_w, tl.float32) * (b_x * scale)[None, :]
        scale = tl.load(p_scale + HAS_GATE * HIGH * WIDE + k // _BLOCK, mask=k < D, other=0.0)
        b_w = tl.load(p_w + HAS_GATE * I * D + k[None, :], mask=mask_w, other=0.0)
        up += widen(b_w, tl.float32) * (b_x * scale)[None, :]
    b_hidden = activate(tl.sum(gate, 1), tl.sum(up, 1), HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair.to(tl.int64) * I + index_n
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=index_n < I)


@triton.jit
def _fp8_out_kernel(
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of one token, the weighted sum over its FP8 experts, by widened
    weights.

    Grid: (tokens, D / BLOCK_N). Tile: BLOCK_N rows of weights by BLOCK_K columns, outside the
    tensor cores; the loop runs over all experts' columns. Pipeline: STAGES tiles.
    """
    CHUNKS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    HIGH: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    token = tl.program_id(0)
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < D)[:, None]
    p_w = down + index_n[:, None] * I
    p_scale = scales + first_n // _BLOCK * WIDE
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for step in tl.range(0, TOP_K * CHUNKS, num_stages=STAGES):
        pair = token * TOP_K + step // CHUNKS
        k = step % CHUNKS * BLOCK_K + index_k
        expert = tl.load(expert_ids + pair).to(tl.int64)
        mask_k = (k < I) & (expert < E)
        weight = tl.where(expert < E, tl.load(expert_weights + pair).to(tl.float32), 0.0)
        scale = tl.load(p_scale + expert * (HIGH * WIDE) + k // _BLOCK, mask=mask_k, other=0.0)
        b_h = tl.load(hidden + pair * I + k, mask=mask_k, other=0.0)
        mask = mask_n & mask_k[None, :]
        b_w = tl.load(p_w + expert * (D * I) + k[None, :], mask=mask, other=0.0)
        acc += widen(b_w, tl.float32) * (b_h.to(tl.float32) * (weight * scale))[None, :]
    b_out = tl.sum(acc, 1)
    p_out = out + token.to(tl.int64) * D + index_n
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=index_n < D)


@triton.jit
def _fp8_gate_up_kernel(
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
    ROUNDS: tl.constexpr,  # tokens too
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of BLOCK_M pairs of one FP8 expert: a grouped GEMM,
    activated.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_M by BLOCK_N, in steps of BLOCK_K columns, each step's sums scaled. Pipeline: STAGES
    tiles.
    """
    NUM_COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    HIGH: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    first_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    p_x = x + (pair // TOP_K * stride_x)[:, None]
    p_w = gate_up + expert.to(tl.int64) * ((1 + HAS_GATE) * I * D) + index_n[:, None] * D
    p_scale = scales + (expert * ((1 + HAS_GATE) * HIGH) + first_n // _BLOCK) * WIDE
    zeros = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    gate = zeros
    up = zeros
    for first in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < D), other=0.0)
        mask_w = mask_n[:, None] & (k < D)
        if HAS_GATE:
            b_w = tl.load(p_w + k, mask=mask_w, other=0.0)
            scale = tl.load(p_scale + first // _BLOCK)
            gate += fp8_product(b_w, b_x, zeros, ROUNDS) * scale
        b_w = tl.load(p_w + HAS_GATE * I * D + k, mask=mask_w, other=0.0)
        scale = tl.load(p_scale + HAS_GATE * HIGH * WIDE + first // _BLOCK)
        up += fp8_product(b_w, b_x, zeros, ROUNDS) * scale
    b_hidden = activate(gate, up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair[None, :] * I + index_n[:, None]
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def _fp8_down_kernel(
    hidden: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    ROUNDS: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of BLOCK_M pairs of one FP8 expert: a grouped GEMM.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_M by BLOCK_N, in steps of BLOCK_K columns, each step's sums scaled. Pipeline: STAGES
    tiles.
    """
    NUM_COLUMNS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    HIGH: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    first_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = index_n < D
    p_x = hidden + pair[:, None] * I
    p_w = down + expert.to(tl.int64) * (D * I) + index_n[:, None] * I
    p_scale = scales + (expert * HIGH + first_n // _BLOCK) * WIDE
    zeros = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc = zeros
    for first in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < I), other=0.0)
        b_w = tl.load(p_w + k, mask=mask_n[:, None] & (k < I), other=0.0)
        scale = tl.load(p_scale + first // _BLOCK)
        acc += fp8_product(b_w, b_x, zeros, ROUNDS) * scale
    p_out = results + pair[None, :] * D + index_n[:, None]
    tl.store(p_out, acc.to(results.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
