"""Implementation "triton": a warp takes a token, and finds its best expert k times."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.route.op import Route
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind

_TILE = 256  # scores that a warp takes at least: several tokens where experts are few
LOWEST: tl.constexpr = tl.constexpr(-(2**31))


def route(x: Route) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::route``."""
    num_tokens, num_experts = x.logits.shape
    logits = x.logits if x.logits.stride(1) == 1 else x.logits.contiguous()
    weights, ids = x.empty()
    if not num_tokens:
        return weights, ids
    group = triton.next_power_of_2(num_experts // x.num_groups)
    block = group * triton.next_power_of_2(x.num_groups)
    num_rows = max(1, _TILE // block)
    bind(_route_kernel, x)[(triton.cdiv(num_tokens, num_rows),)](
        logits=logits,
        weights=weights,
        ids=ids,
        stride=logits.stride(0),
        K=x.k,
        G=x.num_groups,
        BEST_G=x.num_best_groups,
        SIGMOID=x.score == "sigmoid",
        HAS_BIAS=x.bias is not None,
        ROWS=num_rows,
        BLOCK_G=block // group,
        BLOCK_E=group,
        BLOCK_K=triton.next_power_of_2(x.k),
        num_warps=1,
    )
    return weights, ids


@triton.jit(do_not_specialize=["num_tokens", "stride", "epsilon", "scale"])
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BEST_G: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of ROWS tokens in a program.

    Scores are integers in their order. Each round takes their maximum, and the first place of it.
    """
    follow(EARLY)
    SIZE: tl.constexpr = E // G
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask_row = row < num_tokens
    place = tl.arange(0, BLOCK_G * BLOCK_E)[
        None, :
    ]  # groups lie apart where they are no power of 2
    expert = (place // BLOCK_E) * SIZE + place % BLOCK_E
    is_expert = (place % BLOCK_E < SIZE) & (place // BLOCK_E < G)
    mask = mask_row[:, None] & is_expert
    b_x = tl.load(logits + row[:, None] * stride + expert, mask=mask, other=-float("inf"))
    b_score = _scores(b_x.to(tl.float32), SIGMOID)
    b_choice = b_score
    if HAS_BIAS:
        b_choice += tl.load(bias + expert, mask=is_expert, other=0.0)
    b_left = tl.where(mask, _order(b_choice), LOWEST)
    if BEST_G < G:
        b_left = _within_best_groups(b_left, place, G, BEST_G, ROWS, BLOCK_G, BLOCK_E)
    column = tl.arange(0, BLOCK_K)[None, :]
    b_weight = tl.zeros((ROWS, BLOCK_K), tl.float32)
    b_id = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for i in tl.static_range(K):
        best = tl.max(b_left, 1)[:, None]
        at = tl.min(tl.where(b_left == best, place, BLOCK_G * BLOCK_E), 1)[:, None]
        is_best = place == at
        b_left = tl.where(is_best, LOWEST, b_left)
        if HAS_BIAS:
            value = tl.sum(tl.where(is_best, b_score, 0.0), 1)[:, None]
        else:
            value = _choice_of(best)
        b_weight = tl.where(column == i, value, b_weight)
        b_id = tl.where(column == i, (at // BLOCK_E) * SIZE + at % BLOCK_E, b_id)
    if RENORMALISE:
        b_weight = b_weight / (tl.sum(b_weight, 1)[:, None] + epsilon)
    b_weight *= scale
    to = row[:, None] * K + column
    keep = mask_row[:, None] & (column < K)
    tl.store(weights + to, b_weight.to(weights.dtype.element_ty), mask=keep)
    tl.store(ids + to, b_id.to(tl.int64), mask=keep)


@triton.jit
def _scores(b_x: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    """Compute scores of logits [ROWS, experts], minus infinity where there is no expert."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-b_x))
    b_e = tl.exp(b_x - tl.max(b_x, 1)[:, None])
    return b_e / tl.sum(b_e, 1)[:, None]


@triton.jit
def _order(b_choice: tl.tensor) -> tl.tensor:
    """Map floats to integers in their order, NaN above all numbers, all of them above LOWEST."""
    b_choice += 0.0  # -0 is 0
    bits = b_choice.to(tl.int32, bitcast=True)
    return tl.where(b_choice != b_choice, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _choice_of(order: tl.tensor) -> tl.tensor:
    """Map such an integer to its float."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _within_best_groups(
    b_order: tl.tensor,
    place: tl.tensor,
    G: tl.constexpr,
    BEST_G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tensor:
    """Keep the order of experts in groups whose two best have the largest sums; lower others."""
    groups = tl.reshape(b_order, (ROWS, BLOCK_G, BLOCK_E))
    places = tl.reshape(place, (1, BLOCK_G, BLOCK_E))
    first = tl.max(groups, 2)
    is_first = groups == first[:, :, None]
    at = tl.min(tl.where(is_first, places, BLOCK_G * BLOCK_E), 2)
    second = tl.max(tl.where(places == at[:, :, None], LOWEST, groups), 2)
    index = tl.arange(0, BLOCK_G)[None, :]
    b_left = _order(_choice_of(first) + _choice_of(second))
    b_left = tl.where(index < G, b_left, LOWEST)
    is_best = tl.zeros((ROWS, BLOCK_G), tl.int1)
    for _ in tl.static_range(BEST_G):
        best = tl.max(b_left, 1)[:, None]
        at = tl.min(tl.where(b_left == best, index, BLOCK_G), 1)[:, None]
        is_best = is_best | (index == at)
        b_left = tl.where(index == at, LOWEST, b_left)
    groups = tl.where(is_best[:, :, None], groups, LOWEST)
    return tl.reshape(groups, (ROWS, BLOCK_G * BLOCK_E))
