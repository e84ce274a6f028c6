"""Implementation "triton": grouped products of torch, and kernels for what lies between them.

All grids follow from shapes, and nothing is read on the host where torch multiplies groups on the
device: on CUDA in bfloat16. Rows past ``starts[E]``, of pairs without an expert, are neither
written nor read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.fused_experts._triton_activation import activate, activated, tanh
from torch_hybrid.ops.fused_experts._triton_group import group_pairs
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.training._torch import product, weight_product
from torch_hybrid.ops.fused_experts.training.op import (
    FusedExpertsBackward,
    empty_gradients,
    empty_results,
)
from torch_hybrid.ops.triton.launch import bind

_TILE = 1024  # elements
_PARTS = 8  # of the weights of an expert that are cleared


@without_autocast
def fused_experts_forward(x: FusedExperts) -> tuple[Tensor, Tensor]:
    """Compute outputs, and products with gate and up."""
    if x.num_pairs == 0 or x.num_experts == 0:
        out, projected = empty_results(x)
        return out.zero_(), projected
    order, starts = group_pairs(x.expert_ids, x.num_experts)
    rows, places = _gathered(x, x.x, order, starts)
    projected = product(rows, x, "gate_up", starts[1:], fills=False)
    hidden = x.x.new_empty(x.num_pairs, x.width)
    rows_of_tile, block = _tile(x.width)
    bind(_activate_kernel, x)[
        (triton.cdiv(x.num_pairs, rows_of_tile), triton.cdiv(x.width, block))
    ](
        projected=projected,
        hidden=hidden,
        order=order,
        starts=starts,
        **activated(x),
        E=x.num_experts,
        I=x.width,
        ROWS=rows_of_tile,
        BLOCK=block,
    )
    results = product(hidden, x, "down", starts[1:], fills=False)
    return _summed(x, results, places), projected.view(*x.expert_ids.shape, projected.shape[1])


@without_autocast
def fused_experts_backward(x: FusedExpertsBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of x, of the router's weights, and of experts that need one."""
    if x.num_pairs == 0 or x.num_experts == 0:
        return tuple(each.zero_() for each in empty_gradients(x))
    dweights = torch.zeros_like(x.expert_weights)  # of pairs without an expert
    dgate_up = ddown = x.x.new_empty(0)
    order, starts = group_pairs(x.expert_ids, x.num_experts)
    dresults, places = _gathered(x, x.dout, order, starts)
    dweighted = product(dresults, x, "down", starts[1:], of_output=True, fills=False)
    weighted, dprojected = torch.empty_like(dweighted), torch.empty_like(x.projected).flatten(0, 1)
    rows_of_tile, block = _tile(x.width)
    bind(_activate_backward_kernel, x)[(triton.cdiv(x.num_pairs, rows_of_tile),)](
        dweighted=dweighted,
        weighted=weighted,
        dprojected=dprojected,
        dweights=dweights,
        order=order,
        starts=starts,
        **activated(x),
        E=x.num_experts,
        I=x.width,
        ROWS=rows_of_tile,
        BLOCK=block,
        num_warps=8,
    )
    if x.needs_down:
        ddown = _weight_product(x, dresults, weighted, x.down, starts)
    del dresults, weighted
    if x.needs_gate_up:
        rows, _ = _gathered(x, x.x, order, starts)
        dgate_up = _weight_product(x, dprojected, rows, x.gate_up, starts)
        del rows
    drows = product(dprojected, x, "gate_up", starts[1:], of_output=True, fills=False)
    return _summed(x, drows, places), dweights, dgate_up, ddown


def _tile(width: int) -> tuple[int, int]:
    """Choose rows and columns of a tile for rows of this width."""
    block = min(_TILE, triton.next_power_of_2(width))
    return max(1, _TILE // block), block


def _gathered(x: FusedExperts, tokens: Tensor, order: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    """Gather a row for each pair, in the order of experts, and find the row of each pair."""
    rows, places = tokens.new_empty(len(order), x.dim), torch.empty_like(order)
    block = min(_TILE, triton.next_power_of_2(x.dim))
    bind(_gather_kernel, x)[(len(order), triton.cdiv(x.dim, block))](
        tokens=tokens,
        rows=rows,
        places=places,
        order=order,
        starts=starts,
        stride_tokens=tokens.stride(0),
        E=x.num_experts,
        D=x.dim,
        BLOCK=block,
    )
    return rows, places


def _summed(x: FusedExperts, results: Tensor, places: Tensor) -> Tensor:
    """Sum the results of each token, in the order of its choices."""
    out = x.x.new_empty(x.x.shape)
    block = min(_TILE, triton.next_power_of_2(x.dim))
    bind(_sum_kernel, x)[(len(out), triton.cdiv(x.dim, block))](
        results=results, places=places, out=out, E=x.num_experts, D=x.dim, BLOCK=block
    )
    return out


def _weight_product(
    x: FusedExperts, dout: Tensor, rows: Tensor, like: Tensor, starts: Tensor
) -> Tensor:
    """Sum ``dout^T rows`` over the rows of each expert, 0 where there are none."""
    grad = weight_product(dout, rows, like, starts[1:])
    # Of groups without rows torch leaves anything on Blackwell (pytorch #172439).
    bind(_clear_kernel, x)[(len(like), _PARTS)](
        grad=grad, starts=starts, size=like[0].numel(), PARTS=_PARTS, BLOCK=_TILE
    )
    return grad


@triton.jit
def _gather_kernel(
    tokens: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    stride_tokens: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy BLOCK columns of the token of one row. Grid: (rows, D / BLOCK)."""
    row = tl.program_id(0)
    if row >= tl.load(starts + E):
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(order + row)
    tl.store(places + pair, row)
    b_x = tl.load(tokens + (pair // TOP_K).to(tl.int64) * stride_tokens + index, mask=index < D)
    tl.store(rows + row.to(tl.int64) * D + index, b_x, mask=index < D)


@triton.jit
def _sum_kernel(
    results: tl.tensor,
    expert_ids: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum BLOCK columns of one token over its experts. Grid: (tokens, D / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        is_there = tl.load(expert_ids + pair) < E  # else nothing was written for it
        row = tl.load(places + pair, mask=is_there, other=0).to(tl.int64)
        result = tl.load(results + row * D + index, mask=(index < D) & is_there, other=0.0)
        acc += result.to(tl.float32)
    tl.store(out + token * D + index, acc.to(out.dtype.element_ty), mask=index < D)


@triton.jit
def _clear_kernel(
    grad: tl.tensor,
    starts: tl.tensor,
    size: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write 0 to a part of the weights of an expert without rows. Grid: (experts, PARTS)."""
    expert = tl.program_id(0)
    if tl.load(starts + expert) < tl.load(starts + expert + 1):
        return
    p_grad = grad + expert.to(tl.int64) * size
    for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
        index = first + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], dtype=grad.dtype.element_ty)
        tl.store(p_grad + index, zeros, mask=index < size)


@triton.jit
def _activate_kernel(
    projected: tl.tensor,
    expert_weights: tl.tensor,
    hidden: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Activate BLOCK columns of ROWS rows, by the router's weights. Grid: (rows, I / BLOCK)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = row < tl.load(starts + E)
    mask = is_there[:, None] & (index < I)[None, :]
    pair = tl.load(order + row, mask=is_there, other=0)
    b_weight = tl.load(expert_weights + pair, mask=is_there, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * ((1 + HAS_GATE) * I) + index[None, :]
    b_gate = tl.load(projected + at, mask=mask, other=0.0).to(tl.float32)
    b_up = b_gate
    if HAS_GATE:
        b_up = tl.load(projected + at + I, mask=mask, other=0.0).to(tl.float32)
    b_hidden = activate(b_gate, b_up, HAS_GATE, LIMIT, SOFTCAPS) * b_weight[:, None]
    p_hidden = hidden + row.to(tl.int64)[:, None] * I + index[None, :]
    tl.store(p_hidden, b_hidden.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward_kernel(
    projected: tl.tensor,
    expert_weights: tl.tensor,
    dweighted: tl.tensor,
    weighted: tl.tensor,
    dprojected: tl.tensor,
    dweights: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute gradients before the activation of ROWS rows, by BLOCK columns. Grid: rows.

    Activations by the router's weights are made anew, for the products that follow.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = row < tl.load(starts + E)
    pair = tl.load(order + row, mask=is_there, other=0)
    b_weight = tl.load(expert_weights + pair, mask=is_there, other=0.0).to(tl.float32)[:, None]
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, I, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = is_there[:, None] & (index < I)[None, :]
        at = row.to(tl.int64)[:, None] * I + index[None, :]
        at_gate = row.to(tl.int64)[:, None] * ((1 + HAS_GATE) * I) + index[None, :]
        b_gate = tl.load(projected + at_gate, mask=mask, other=0.0).to(tl.float32)
        b_up = b_gate
        if HAS_GATE:
            b_up = tl.load(projected + at_gate + I, mask=mask, other=0.0).to(tl.float32)
        b_hidden, b_by_gate, b_by_up = _derivatives(b_gate, b_up, HAS_GATE, LIMIT, SOFTCAPS)
        b_d = tl.load(dweighted + at, mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_d * b_hidden, 1)
        tl.store(weighted + at, (b_hidden * b_weight).to(weighted.dtype.element_ty), mask=mask)
        b_d *= b_weight
        dtype = dprojected.dtype.element_ty
        if HAS_GATE:
            tl.store(dprojected + at_gate, (b_d * b_by_gate).to(dtype), mask=mask)
        tl.store(dprojected + at_gate + HAS_GATE * I, (b_d * b_by_up).to(dtype), mask=mask)
    tl.store(dweights + pair, b_sum.to(dweights.dtype.element_ty), mask=is_there)


@triton.jit
def _derivatives(
    gate: tl.tensor,
    up: tl.tensor,
    HAS_GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFTCAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute what ``activate`` does, and its derivatives by gate and up."""
    if not HAS_GATE:
        positive = tl.maximum(up, 0.0)
        return positive * positive, up, 2 * positive
    is_gate_free = gate == gate
    is_up_free = is_gate_free
    if LIMIT is not None:
        is_gate_free = gate <= LIMIT
        is_up_free = tl.abs(up) <= LIMIT
        gate = tl.minimum(gate, LIMIT)
        up = tl.clamp(up, -LIMIT, LIMIT)
    sigmoid = 1 / (1 + tl.exp(-gate))
    factor = gate
    by_factor = 1.0
    by_up = 1.0
    if SOFTCAPS is not None:
        bound = tanh(gate * (1 / SOFTCAPS[0]))
        bound_up = tanh(up * (1 / SOFTCAPS[1]))
        factor = SOFTCAPS[0] * bound
        up = SOFTCAPS[1] * bound_up
        by_factor = 1 - bound * bound
        by_up = 1 - bound_up * bound_up
    activated_gate = factor * sigmoid
    by_gate = sigmoid * (by_factor + factor * (1 - sigmoid)) * up
    return (
        activated_gate * up,
        tl.where(is_gate_free, by_gate, 0.0),
        tl.where(is_up_free, activated_gate * by_up, 0.0),
    )
