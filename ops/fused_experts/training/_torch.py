"""Implementation "torch": rows in the order of experts, and a grouped product for each weight.

Weights of a router are multiplied into hidden activations, not into outputs, so that a backward
needs no outputs of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.reference import activate
from torch_hybrid.ops.fused_experts.training.op import FusedExpertsBackward
from torch_hybrid.ops.native.matrix_product import multiply


def activated_rows(x: FusedExperts, projected: Tensor, order: Tensor) -> Tensor:
    """Activate rows [P, 2 I] in the order of experts, by the router's weights."""
    weights = x.expert_weights.flatten()[order, None]
    return (activate(x, projected) * weights).to(projected.dtype)


def differentiated_rows(
    x: FusedExperts, projected: Tensor, order: Tensor, dweighted: Tensor
) -> tuple[Tensor, ...]:
    """Activate rows, and compute the gradients before that of what ``dweighted`` [P, I] is of.

    Returns:
        [P, I] activations by the router's weights, gradients of ``projected``, and [T, k] of these
        weights.
    """
    hidden, slopes = derivatives(x, projected)
    weights = x.expert_weights.flatten()[order, None]
    work = torch.promote_types(projected.dtype, torch.float32)
    dweights = (dweighted * hidden).sum(-1, dtype=work)[places(order)].view(x.expert_ids.shape)
    dhidden = (dweighted * weights).to(projected.dtype)
    dprojected = slopes.unflatten(-1, (x.num_parts, x.width)).mul_(dhidden[:, None]).flatten(1)
    weighted = (hidden * weights).to(projected.dtype)
    return weighted, dprojected, dweights.to(x.expert_weights.dtype)


@without_autocast
def fused_experts_forward(
    x: FusedExperts, *, activated: Callable[..., Tensor] = activated_rows
) -> tuple[Tensor, Tensor]:
    """Compute outputs, and products with gate and up."""
    order, ends = by_expert(x)
    rows = x.x.index_select(0, order // x.top_k)
    projected = product(rows, x, "gate_up", ends)
    results = product(activated(x, projected, order), x, "down", ends)
    return summed(results, x, order), projected.view(*x.expert_ids.shape, projected.shape[1])


@without_autocast
def fused_experts_backward(
    x: FusedExpertsBackward,
    *,
    differentiated: Callable[..., tuple[Tensor, ...]] = differentiated_rows,
) -> tuple[Tensor, ...]:
    """Compute the gradients of x, of the router's weights, and of experts that need one."""
    order, ends = by_expert(x)
    token = order // x.top_k
    dresults = x.dout.index_select(0, token)
    dweighted = product(dresults, x, "down", ends, of_output=True)
    projected = x.projected.flatten(0, 1)
    weighted, dprojected, dweights = differentiated(x, projected, order, dweighted)
    ddown = dgate_up = x.x.new_empty(0)
    if x.needs_down:
        ddown = weight_product(dresults, weighted, x.down, ends)
    if x.needs_gate_up:
        rows = x.x.index_select(0, token)
        dgate_up = weight_product(dprojected, rows, x.gate_up, ends)
    drows = product(dprojected, x, "gate_up", ends, of_output=True)
    return summed(drows, x, order), dweights, dgate_up, ddown


def by_expert(x: FusedExperts) -> tuple[Tensor, Tensor]:
    """Sort pairs of a token and an expert by expert.

    Returns:
        [T k] int64 pair of each row, and [E] int32 row where those of each expert end.
    """
    ids, order = x.expert_ids.flatten().sort(stable=True)
    experts = torch.arange(x.num_experts, dtype=ids.dtype, device=ids.device)
    return order, torch.searchsorted(ids, experts, right=True, out_int32=True)


def product(
    rows: Tensor,
    x: FusedExperts,
    name: str,
    ends: Tensor,
    *,
    of_output: bool = False,
    fills: bool = True,
) -> Tensor:
    """Multiply rows [R, K] by each one's expert [N, K]; rows without one give 0.

    Args:
        rows: [R, K] in the order of experts; with ``of_output`` [R, N].
        x: has the weights.
        name: "gate_up" or "down".
        ends: [E] int32 row where those of each expert end.
        of_output: whether weights are transposed.
        fills: whether the 0 of rows without an expert are written.
    """
    weight, scales, num_parts = x.down, x.down_scales, 1
    if name == "gate_up":
        weight, scales, num_parts = x.gate_up, x.gate_up_scales, x.num_parts
    if rows.device.type != "cpu":
        if scales is not None:
            weight = dequantized(weight, scales, rows.dtype, num_parts=num_parts)
        out = F.grouped_mm(rows, weight if of_output else weight.mT, offs=ends)
        if not fills:
            return out
        row = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
        return out.masked_fill((row >= ends[-1])[:, None], 0)
    width = (x.num_parts * x.width, x.dim) if name == "gate_up" else (x.dim, x.width)
    out = rows.new_empty(len(rows), width[of_output])
    *groups, past = zip(*(each.split(_counts(ends, rows)) for each in (rows, out)), strict=True)
    past[1].zero_()
    oriented = weight if of_output or scales is not None else weight.mT
    for expert, ((row, result), worth) in enumerate(zip(groups, oriented.unbind(), strict=True)):
        if scales is not None:  # one expert at a time
            if len(row) == 0:
                continue
            worth = dequantized(worth, scales[expert], rows.dtype, num_parts=num_parts)
            worth = worth if of_output else worth.T
        multiply(row, worth, result)
    return out


def weight_product(dout: Tensor, rows: Tensor, like: Tensor, ends: Tensor) -> Tensor:
    """Sum ``dout^T rows`` over the rows of each expert, 0 where there are none.

    Args:
        dout: [R, N] in the order of experts.
        rows: [R, K] likewise.
        like: [E, N, K] weights.
        ends: [E] int32 row where those of each expert end.
    """
    if rows.device.type != "cpu":
        grad: Tensor = F.grouped_mm(dout.T, rows, offs=ends)
        return grad
    out = torch.empty_like(like)
    counts = _counts(ends, rows)
    for each, row, grad in zip(dout.split(counts), rows.split(counts), out, strict=False):
        multiply(each.T, row, grad)
    return out


def summed(results: Tensor, x: FusedExperts, order: Tensor) -> Tensor:
    """Sum the results [R, D] of each token, in the order of its choices."""
    return F.embedding_bag(places(order).view(x.expert_ids.shape), results, mode="sum")


def places(order: Tensor) -> Tensor:
    """Find the row of each pair."""
    row = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return torch.empty_like(order).scatter_(0, order, row)


def derivatives(x: FusedExperts, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Compute hidden activations [R, I], and their derivatives by each of [R, 2 I] or [R, I]."""
    if not x.has_gate:
        positive = F.relu(projected)
        return positive.square(), 2 * positive
    gate, up = projected.chunk(2, -1)
    if x.limit is not None:
        is_gate_free, is_up_free = gate <= x.limit, up.abs() <= x.limit
        gate, up = gate.clamp(max=x.limit), up.clamp(-x.limit, x.limit)
    sigmoid = torch.sigmoid(gate)
    factor, rest = gate, 1 - sigmoid
    slope = sigmoid * (1 + gate * rest)
    up_slope: Tensor | None = None
    if x.softcaps is not None:
        bound_gate, bound_up = (
            torch.tanh(p / c) for p, c in zip((gate, up), x.softcaps, strict=True)
        )
        factor, up = x.softcaps[0] * bound_gate, x.softcaps[1] * bound_up
        slope = sigmoid * (1 - bound_gate.square() + factor * rest)
        up_slope = 1 - bound_up.square()
    activated = factor * sigmoid
    hidden, slope = activated * up, slope * up
    if up_slope is not None:
        activated = activated * up_slope
    if x.limit is not None:
        slope, activated = slope * is_gate_free, activated * is_up_free
    return hidden, torch.cat([slope, activated], -1)


def _counts(ends: Tensor, rows: Tensor) -> list[int]:
    """Count the rows of each expert, and those without one."""
    bounds = [0, *ends.tolist(), len(rows)]
    return [end - start for start, end in pairwise(bounds)]
