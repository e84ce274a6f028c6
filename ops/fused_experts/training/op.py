"""Experts to train with: grouped products forward and backward, with nothing added atomically."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Dense, define, pair_made, several_made
from torch_hybrid.ops.core.registration import check_shapes, same_or_first_impl
from torch_hybrid.ops.formats import stored_weights
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton

_FOLDER = "torch_hybrid.ops.fused_experts.training"
FORWARD, BACKWARD = (
    {
        "cpp": in_cpp(
            f"{_FOLDER}._cpu:{name}", features=stored_weights.FEATURES, checks_indices=False
        ),
        "triton": in_triton(f"{_FOLDER}._triton:{name}", features=stored_weights.FEATURES),
        "torch": in_torch(
            f"{_FOLDER}._torch:{name}",
            dtypes=FLOATS_AND_FLOAT64,
            features=stored_weights.FEATURES,
        ),
    }
    for name in ("fused_experts_forward", "fused_experts_backward")
)


@dataclass(slots=True, repr=False, eq=False)
class FusedExpertsForward(FusedExperts):
    """Experts as ``fused_experts`` computes them; ``torch_hybrid.functional`` states them.

    Args:
        x, expert_ids, expert_weights, gate_up, down, gate_up_scales, down_scales: see
            ``fused_experts``.
        activation, limit, softcaps: likewise.

    Returns:
        [T, D] outputs in x's dtype, and [T, k, 2 I] products with gate and up, or [T, k, I] without
        a gate. These lie in the order of experts, and there in that of pairs of a token and an
        expert.
    """

    gate_up_scales: Annotated[Tensor | None, Dense("...", dtype=torch.float32)]
    down_scales: Annotated[Tensor | None, Dense("...", dtype=torch.float32)]


@dataclass(slots=True, repr=False, eq=False)
class FusedExpertsBackward(FusedExpertsForward):
    """Gradients of :func:`fused_experts_forward`, in fixed orders of sums.

    Args:
        x, expert_ids, expert_weights, gate_up, down, gate_up_scales, down_scales: those of the
            forward.
        activation, limit, softcaps: likewise.
        projected: what the forward returned beside outputs.
        dout: [T, D] gradient of the outputs, in x's dtype.
        needs_gate_up, needs_down: whether gradients of these are made.

    Returns:
        Gradients of x, expert_weights, gate_up and down; the last two are empty where nothing needs
        them.
    """

    projected: Annotated[Tensor, Dense("T", "k", "columns")]
    dout: Annotated[Tensor, Dense("T", "D")]
    needs_gate_up: bool = field(kw_only=True)
    needs_down: bool = field(kw_only=True)

    def check(self) -> None:
        """Raise ValueError for what the forward refuses, and for products of another shape."""
        FusedExpertsForward.check(self)
        shape = (*self.expert_ids.shape, self.num_parts * self.width)
        check_shapes({"projected": (self.projected, shape)})


def empty_results(x: FusedExperts) -> tuple[Tensor, Tensor]:
    """Make the tensors that the forward returns."""
    projected = (*x.expert_ids.shape, x.num_parts * x.width)
    return x.x.new_empty(x.x.shape), x.x.new_empty(projected)


def empty_gradients(x: FusedExpertsBackward) -> tuple[Tensor, ...]:
    """Make the tensors that the backward returns."""
    weights = ((x.gate_up, x.needs_gate_up), (x.down, x.needs_down))
    return (
        x.x.new_empty(x.x.shape),
        x.expert_weights.new_empty(x.expert_weights.shape),
        *(x.x.new_empty(each.shape if needs else 0) for each, needs in weights),
    )


fused_experts_backward = define(
    FusedExpertsBackward,
    BACKWARD,
    returns=several_made(4, empty_gradients),
    floats=frozenset(),
    flops="2 * T * k * x.width * D * (x.num_parts * (1 + x.needs_gate_up) + 1 + x.needs_down)",
)


def _gradients(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """Call the backward for the gradients that something needs."""
    if dout is None:
        return (None,) * 7
    *given, _, projected = ctx.saved_tensors
    options = dict(ctx.options)
    x, impl = given[0], options.pop("impl")
    needs_gate_up, needs_down = ctx.needs_input_grad[3:5]
    dx, dweights, dgate_up, ddown = fused_experts_backward(
        *(*given, projected, dout.contiguous()),
        needs_gate_up=needs_gate_up,
        needs_down=needs_down,
        **options,
        impl=same_or_first_impl("fused_experts_backward", impl, x.device, x.dtype),
    )
    of_weights = (dgate_up if needs_gate_up else None, ddown if needs_down else None)
    return dx, None, dweights, *of_weights, None, None


fused_experts_forward = define(
    FusedExpertsForward,
    FORWARD,
    returns=pair_made(empty_results),
    floats=frozenset(),
    flops="2 * T * k * (x.num_parts + 1) * x.width * D",
    backward=_gradients,
    saves_results=1,
)
