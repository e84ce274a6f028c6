"""Implementation "triton": pairs of a token and its expert, grouped by expert on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats import block_scales
from torch_hybrid.ops.fused_experts._hopper import (
    fp8_hopper_products,
    hopper_products,
    suits,
    suits_fp8,
)
from torch_hybrid.ops.fused_experts._triton_activation import activate, activated, sizes
from torch_hybrid.ops.fused_experts._triton_few import multiply_few
from torch_hybrid.ops.fused_experts._triton_fp8 import FP8, ROUNDED_FP8
from torch_hybrid.ops.fused_experts._triton_group import group_pairs, num_blocks, rows_of_block
from torch_hybrid.ops.fused_experts._triton_integers import INTEGERS
from torch_hybrid.ops.fused_experts._triton_loader import Loader
from torch_hybrid.ops.fused_experts._triton_plain import PLAIN
from torch_hybrid.ops.fused_experts._triton_scaled import scaled_products
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.op_expert_linear import ExpertLinear
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import dot

# Up to so many tokens, hardly an expert has two of them.
_FEW_TOKENS = 4
_ANY_SHARE = 32  # of tiles for any number of pairs

Products = Callable[..., None]


def fused_experts(x: FusedExperts, *, is_invariant: bool = False) -> Tensor:
    """Launch the kernels for so many pairs, and for the weights' format.

    With ``is_invariant``, any number of tokens goes through one tile, in one order of sums.
    """
    if x.num_pairs == 0 or x.num_experts == 0:
        return x.x.new_zeros(x.x.shape)
    loader = _loader(x)
    if len(x.x) <= _FEW_TOKENS and not is_invariant:
        return multiply_few(x, loader)
    if not (is_invariant or x.has_scales) and suits(x):
        return _many_tokens(x, hopper_products)
    return _many_tokens(x, _products_by(loader, x, is_invariant=is_invariant))


def expert_linear(x: ExpertLinear, *, is_invariant: bool = False) -> Tensor:
    """Launch the kernel of the second product, for rows in the place of hidden activations."""
    out = x.empty().zero_()
    if out.numel():
        call = x.as_experts()
        order, starts = group_pairs(call.expert_ids, call.num_experts)
        products = _products_by(_loader(call), call, is_invariant=is_invariant)
        products(call, order, starts, out, hidden=x.x.contiguous())
    return out


def _loader(x: FusedExperts) -> Loader:
    """Return the loader of the weights' format."""
    if not x.has_scales:
        return PLAIN
    return FP8 if x.down.dtype == block_scales.DTYPE else INTEGERS


def _products_by(loader: Loader, x: FusedExperts, *, is_invariant: bool = False) -> Products:
    """Choose who launches for many tokens, by tiles for the pairs of an expert; invariant, by one
    tile for any number."""
    share = _ANY_SHARE if is_invariant else triton.cdiv(x.num_pairs, x.num_experts)
    return partial(_products if loader is PLAIN else scaled_products, loader=loader, share=share)


def rounded_experts(x: FusedExperts) -> Tensor:
    """Launch the kernels that round tokens to FP8, where there are several."""
    if x.num_pairs == 0 or x.num_experts == 0:
        return x.x.new_zeros(x.x.shape)
    if len(x.x) <= _FEW_TOKENS:  # products take no time: rounding would
        return multiply_few(x, FP8)
    return _many_tokens(x, fp8_hopper_products if suits_fp8(x) else _products_by(ROUNDED_FP8, x))


def _many_tokens(x: FusedExperts, products: Products) -> Tensor:
    """Group pairs by expert, multiply each with two weights, and sum each token's results."""
    order, starts = group_pairs(x.expert_ids, x.num_experts)
    results = x.x.new_empty(x.num_pairs, x.dim)
    products(x, order, starts, results)
    out = x.x.new_empty(x.x.shape)
    block = min(1024, triton.next_power_of_2(x.dim))
    bind(_combine_kernel, x)[(len(out), triton.cdiv(x.dim, block))](
        results=results,
        out=out,
        E=x.num_experts,
        D=x.dim,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _products(
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
    tile = loader.tile(x, share)
    blocks = num_blocks(x.num_pairs, x.num_experts, tile.block_m)
    block_n = tile.block_n // x.num_parts
    constants = {
        **sizes(x),
        "BLOCK_E": triton.next_power_of_2(x.num_experts),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    if hidden is None:
        hidden = x.x.new_empty(x.num_pairs, x.width)
        bind(_gate_up_kernel, x, tile)[(blocks * triton.cdiv(x.width, block_n),)](
            hidden=hidden, order=order, starts=starts, **activated(x), BLOCK_N=block_n, **constants
        )
    bind(_down_kernel, x, tile)[(blocks * triton.cdiv(x.dim, tile.block_n),)](
        hidden=hidden, results=results, order=order, starts=starts, **constants
    )


@triton.jit
def _add_product(
    acc: tl.tensor, lost: tl.tensor, x: tl.tensor, w: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Compute ``acc + x @ w``; in float32, compensate what the sum loses to rounding (Kahan's
    ``lost``).

    Each output sums a whole row of weights, one product after the other.
    """
    if x.dtype == tl.float32:
        part = tl.dot(x, w, input_precision="ieee") - lost
        total = acc + part
        lost = (total - acc) - part
        acc = total
    else:
        acc = dot(x, w, acc)
    return acc, lost


@triton.jit
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    hidden: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    stride_x: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N hidden activations of BLOCK_M pairs of one expert: a grouped GEMM with
    activation.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_M by BLOCK_N, in steps of BLOCK_K columns. Registers: one accumulator for gate, one for
    up.
    """
    follow(EARLY)
    NUM_COLUMNS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < I
    index_k = tl.arange(0, BLOCK_K)
    p_x = x + (pair // TOP_K * stride_x)[:, None] + index_k[None, :]
    p_w = gate_up + expert.to(tl.int64) * ((1 + HAS_GATE) * I * D)
    p_w += index_n[None, :] * D + index_k[:, None]
    b_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    lost_gate = b_gate
    b_up = b_gate
    lost_up = b_gate
    for first in range(0, D, BLOCK_K):
        mask_k = first + index_k < D
        mask_w = mask_k[:, None] & mask_n[None, :]
        b_x = tl.load(p_x + first, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        if HAS_GATE:
            b_w = tl.load(p_w + first, mask=mask_w, other=0.0)
            b_gate, lost_gate = _add_product(b_gate, lost_gate, b_x, b_w)
        b_w = tl.load(p_w + HAS_GATE * I * D + first, mask=mask_w, other=0.0)
        b_up, lost_up = _add_product(b_up, lost_up, b_x, b_w)
    b_hidden = activate(b_gate, b_up, HAS_GATE, LIMIT, SOFTCAPS)
    p_hidden = hidden + pair[:, None] * I + index_n[None, :]
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _down_kernel(
    hidden: tl.tensor,
    down: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    E: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of BLOCK_M pairs of one expert: a grouped GEMM.

    Grid: blocks of pairs times columns, in one dimension; blocks past the last pair are idle. Tile:
    BLOCK_M by BLOCK_N, in steps of BLOCK_K columns. Registers: one accumulator.
    """
    follow(EARLY)
    NUM_COLUMNS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = row < end
    pair = tl.load(order + row, mask=mask_m, other=0).to(tl.int64)
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = index_n < D
    index_k = tl.arange(0, BLOCK_K)
    p_x = hidden + pair[:, None] * I + index_k[None, :]
    p_w = down + expert.to(tl.int64) * (D * I) + index_n[None, :] * I + index_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    lost = acc
    for first in range(0, I, BLOCK_K):
        mask_k = first + index_k < I
        b_x = tl.load(p_x + first, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b_w = tl.load(p_w + first, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc, lost = _add_product(acc, lost, b_x, b_w)
    p_out = results + pair[:, None] * D + index_n[None, :]
    tl.store(p_out, acc.to(results.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _combine_kernel(
    results: tl.tensor,
    expert_ids: tl.tensor,
    expert_weights: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Sum BLOCK outputs of one token over its experts, by their weights.

    Grid: (tokens, D / BLOCK). Pairs without an expert (E or more) are not read.
    """
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        is_there = tl.load(expert_ids + pair) < E  # else nothing was written for it
        weight = tl.load(expert_weights + pair).to(tl.float32)
        result = tl.load(results + pair * D + index, mask=(index < D) & is_there, other=0.0)
        acc += tl.where(is_there, weight, 0.0) * result.to(tl.float32)
    tl.store(out + token * D + index, acc.to(out.dtype.element_ty), mask=index < D)
