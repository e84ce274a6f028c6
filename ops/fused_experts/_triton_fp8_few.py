# mypy: disable-error-code="untyped-decorator"
"""Experts of 8 bits for few tokens, which hardly share one: tokens are rounded to 8 bits too.

Each warp multiplies columns of its own: the tensor cores take 16 rows of weights, and of 16 rows of
tokens one is there. That wastes products, of which there are plenty, and saves conversions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.block_scales import BLOCK
from torch_hybrid.ops.fused_experts._triton_activation import activate
from torch_hybrid.ops.triton.fp8 import fp8_dot, rounded

_BLOCK_N = 16  # rows of weights of a program
_PARTS = 4  # warps of a program, and blocks of 128 columns that it multiplies at once
_STAGES = 3
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_M: tl.constexpr = tl.constexpr(16)  # rows that tensor cores take


def rounded_few_tokens(
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
) -> None:
    """Fill ``out`` with what ``torch_hybrid::fused_experts`` returns."""
    num_tokens, top_k = expert_ids.shape
    num_experts, dim, width = down.shape
    hidden = x.new_empty(num_tokens * top_k, width)
    sizes = {"TOP_K": top_k, "E": num_experts, "D": dim, "I": width}
    tile = {"BLOCK_N": _BLOCK_N, "PARTS": _PARTS, "STAGES": _STAGES, "num_warps": _PARTS}
    _rounded_hidden_kernel[(num_tokens * top_k, triton.cdiv(width, _BLOCK_N))](
        x,
        expert_ids,
        gate_up,
        gate_up_scales,
        hidden,
        x.stride(0),
        HAS_GATE=activation == "silu",
        **sizes,
        **tile,
        enable_fp_fusion=True,
    )
    _rounded_out_kernel[(num_tokens, triton.cdiv(dim, _BLOCK_N))](
        hidden,
        expert_ids,
        expert_weights,
        down,
        down_scales,
        out,
        **sizes,
        **tile,
        enable_fp_fusion=True,
    )


@triton.jit
def _row(
    p_x: tl.tensor, k: tl.tensor, mask: tl.tensor, zeros: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Columns k [PARTS, 128] of a row, rounded, as the first of 16 rows; and their units."""
    is_first = (tl.arange(0, _M) == 0)[None, :, None]
    row = tl.load(p_x + k[:, None, :] + zeros, mask=mask[:, None, :] & is_first, other=0.0)
    return rounded(row)


@triton.jit
def _rounded_hidden_kernel(
    x: tl.tensor,
    expert_ids: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: BLOCK_N hidden activations of one pair of a token and an expert."""
    HIGH: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    pair = tl.program_id(0)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if expert == E:
        return
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = (index_n < I)[None, :, None]
    part = tl.arange(0, PARTS)
    column = tl.arange(0, _BLOCK)
    spread = tl.zeros([1, _M, 1], dtype=tl.int32)
    p_x = x + (pair // TOP_K).to(tl.int64) * stride_x
    p_w = gate_up + expert * ((1 + HAS_GATE) * I * D) + (index_n * D)[None, :, None]
    p_scale = scales + (expert * ((1 + HAS_GATE) * HIGH) + first_n // _BLOCK) * WIDE
    zeros = tl.zeros([PARTS, BLOCK_N, _M], dtype=tl.float32)
    gate = zeros
    up = zeros
    for first in tl.range(0, WIDE, PARTS, num_stages=STAGES):
        block = first + part
        k = block[:, None] * _BLOCK + column[None, :]
        b_x, unit = _row(p_x, k, k < D, spread)
        mask_w = mask_n & (k < D)[:, None, :]
        if HAS_GATE:
            b_w = tl.load(p_w + k[:, None, :], mask=mask_w, other=0.0)
            scale = tl.load(p_scale + block, mask=block < WIDE, other=0.0)
            gate += fp8_dot(b_w, b_x, zeros) * (scale[:, None] * unit)[:, None, :]
        b_w = tl.load(p_w + HAS_GATE * I * D + k[:, None, :], mask=mask_w, other=0.0)
        scale = tl.load(p_scale + HAS_GATE * HIGH * WIDE + block, mask=block < WIDE, other=0.0)
        up += fp8_dot(b_w, b_x, zeros) * (scale[:, None] * unit)[:, None, :]
    b_hidden = activate(tl.sum(tl.sum(gate, 0), 1), tl.sum(tl.sum(up, 0), 1), HAS_GATE)
    p_hidden = hidden + pair.to(tl.int64) * I + index_n
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=index_n < I)


@triton.jit
def _rounded_out_kernel(
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
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: BLOCK_N outputs of one token, the weighted sum over its experts."""
    HIGH: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    CHUNKS: tl.constexpr = (I + PARTS * 128 - 1) // (PARTS * 128)
    token = tl.program_id(0)
    first_n = tl.program_id(1) * BLOCK_N
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = (index_n < D)[None, :, None]
    part = tl.arange(0, PARTS)
    column = tl.arange(0, _BLOCK)
    spread = tl.zeros([1, _M, 1], dtype=tl.int32)
    p_w = down + (index_n * I)[None, :, None]
    p_scale = scales + first_n // _BLOCK * WIDE
    zeros = tl.zeros([PARTS, BLOCK_N, _M], dtype=tl.float32)
    acc = zeros
    for step in tl.range(0, TOP_K * CHUNKS, num_stages=STAGES):
        pair = token * TOP_K + step // CHUNKS
        expert = tl.load(expert_ids + pair).to(tl.int64)
        weight = tl.where(expert < E, tl.load(expert_weights + pair).to(tl.float32), 0.0)
        block = step % CHUNKS * PARTS + part
        k = block[:, None] * _BLOCK + column[None, :]
        mask_k = (k < I) & (expert < E)
        b_h, unit = _row(hidden + pair.to(tl.int64) * I, k, mask_k, spread)
        mask_b = (block < WIDE) & (expert < E)
        scale = tl.load(p_scale + expert * (HIGH * WIDE) + block, mask=mask_b, other=0.0)
        mask_w = mask_n & mask_k[:, None, :]
        b_w = tl.load(p_w + expert * (D * I) + k[:, None, :], mask=mask_w, other=0.0)
        acc += fp8_dot(b_w, b_h, zeros) * ((scale * weight)[:, None] * unit)[:, None, :]
    b_out = tl.sum(tl.sum(acc, 0), 1)
    p_out = out + token.to(tl.int64) * D + index_n
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=index_n < D)
