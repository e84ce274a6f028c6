"""Softmax over keys that arrive in tiles, and over splits of the keys."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import early

_LN_2: tl.constexpr = tl.constexpr(math.log(2))


def log2_scale(scale: float) -> float:
    """Scale logits to base 2: return ``scale log2(e)``."""
    return scale * math.log2(math.e)


@triton.jit
def advance(
    products: tl.tensor, scale_log2: tl.tensor, peak: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take in a tile of products ``[rows, keys]``, -inf where a key is hidden.

    ``scale_log2``, of ``log2_scale``, turns products into base-2 logits: one FMA an element, with
    the subtraction of the maximum.

    Returns:
        The tile's weights; the factor of each row's earlier results; each row's running maximum, to
        base 2; and its running sum.
    """
    new_peak = tl.maximum(peak, tl.max(products, 1) * scale_log2)
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key was visible so far
    weights = tl.exp2(products * scale_log2 - shift[:, None])
    rescale = tl.exp2(peak - shift)
    return weights, rescale, new_peak, total * rescale + tl.sum(weights, 1)


@triton.jit
def finish(peak: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the divisor of each row's output, and its natural LSE: -inf without keys."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -float("inf"), (peak + tl.log2(total)) * _LN_2)
    return total, lse


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh to float32 precision, also where 1 - exp(-2x) would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    worth = 1.0 / (1.0 + t)  # to two units of its last place, which a step of Newton's takes off
    large = (1.0 - t) * worth
    large += ((1.0 - t) - large * (1.0 + t)) * worth
    large = tl.where(x < 0, -large, large)
    s = x * x
    small = x + x * s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, small, large)


def merge_splits(
    partial_out: Tensor,
    partial_lse: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Weigh the splits of each row by their share of the softmax; padding rows become (0, -inf).

    Args:
        partial_out: [splits, T, H, D] float32, a power of two of splits; unwritten where
            ``partial_lse`` is -inf.
        partial_lse: [splits, T, H] float32; unwritten in padding rows.
        cu_seqlens: [N + 1] int32; tokens from ``cu_seqlens[N]`` on are padding.
        out: [T, H, D], written.
        lse: [T, H] float32, written.
    """
    num_tokens, num_heads, head_dim = out.shape
    num_splits = partial_out.shape[0]
    block_splits = min(num_splits, 32)
    block_d = min(max(16, triton.next_power_of_2(head_dim)), 4096 // block_splits)
    _merge_kernel[(num_tokens, num_heads, triton.cdiv(head_dim, block_d))](
        partial_out,
        partial_lse,
        cu_seqlens,
        out,
        lse,
        num_tokens,
        cu_seqlens.shape[0] - 1,
        H=num_heads,
        D=head_dim,
        BLOCK_D=block_d,
        NUM_SPLITS=num_splits,
        BLOCK_SPLITS=block_splits,
        num_warps=4,
        enable_fp_fusion=True,
        **early(out.device),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _merge_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Merge NUM_SPLITS partial outputs of one token's head by their LSEs: the reduction of
    split-KV.

    Grid: (tokens, heads, D / BLOCK_D). Tile: BLOCK_SPLITS splits by BLOCK_D elements, in registers.
    Splits whose LSE is -inf are not read; padding rows become (0, -inf).
    """
    num_live = tl.load(cu_seqlens + num_seqs)
    follow(EARLY)
    token = tl.program_id(0)
    row = token.to(tl.int64) * H + tl.program_id(1)
    index_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = index_d < D
    b_o = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_lse = -float("inf")
    if token < num_live:
        stride_split = num_tokens.to(tl.int64) * H
        lses = tl.load(partial_lse + row + tl.arange(0, NUM_SPLITS) * stride_split)
        peak = tl.max(lses, 0)
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        total = tl.sum(tl.exp(lses - shift), 0)
        total = tl.where(total == 0.0, 1.0, total)
        for base in range(0, NUM_SPLITS, BLOCK_SPLITS):
            split_row = row + (base + tl.arange(0, BLOCK_SPLITS)) * stride_split
            weights = tl.exp(tl.load(partial_lse + split_row) - shift)
            # A split without keys has written no output.
            mask = (weights > 0.0)[:, None] & mask_d[None, :]
            p_o = partial_out + split_row[:, None] * D + index_d[None, :]
            b_o += tl.sum(tl.load(p_o, mask=mask, other=0.0) * weights[:, None], 0)
        b_o /= total
        b_lse = peak + tl.log(total)
    tl.store(out + row * D + index_d, b_o.to(out.dtype.element_ty), mask=mask_d)
    if tl.program_id(2) == 0:
        tl.store(lse + row, b_lse)
