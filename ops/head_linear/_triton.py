"""Implementation "triton": tiles of one size, whatever T is, so that a token has the bits that it
has alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.head_linear.op import HeadLinear
from torch_hybrid.ops.triton.products import dot


def head_linear(call: HeadLinear) -> Tensor:
    """Launch ``torch_hybrid::head_linear``."""
    x, weight, out = call.x, call.weight, call.empty()
    num_tokens, num_heads, depth = x.shape
    width = weight.shape[1]
    if not out.numel():
        return out
    # float32 products run outside the tensor cores, on operands held in registers.
    is_float32 = x.dtype == torch.float32
    block_m, block_n, block_k = (16, 64, 32) if is_float32 else (64, 64, 64)
    grid = (triton.cdiv(width, block_n), triton.cdiv(num_tokens, block_m), num_heads)
    _head_linear_kernel[grid](
        x,
        weight,
        call.bias,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        H=num_heads,
        N=width,
        K=depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=2 if is_float32 else 3,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["T"])
def _head_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    T: tl.tensor,
    stride_x_token: tl.tensor,
    stride_x_head: tl.tensor,
    stride_weight_head: tl.tensor,
    stride_weight_row: tl.tensor,
    stride_weight_column: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Multiply BLOCK_M tokens by BLOCK_N rows of the weight of one head in a program.

    The weight is the left side of products, of which tensor cores take 64 rows: so tokens are
    columns, and no column's sums know of the others.
    """
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = token < T, row < N
    p_x = x + head * stride_x_head + token.to(tl.int64)[:, None] * stride_x_token
    p_weight = weight + head * stride_weight_head + row.to(tl.int64)[:, None] * stride_weight_row
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = first + index_k
        mask_k = column < K
        p_w = p_weight + column.to(tl.int64)[None, :] * stride_weight_column
        b_w = tl.load(p_w, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        b_x = tl.load(p_x + column[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        acc = dot(b_w, tl.trans(b_x), acc)
    if bias is not None:
        acc += tl.load(bias + head * N + row, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    p_out = out + (token.to(tl.int64) * H + head)[None, :] * N + row[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
