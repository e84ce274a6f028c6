"""Calls of the forward and the backward to train with."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from tests.ops.fused_experts.cases import Case, make_inputs
from torch_hybrid.ops.fused_experts.training.op import (
    FusedExpertsBackward,
    fused_experts_backward,
    fused_experts_forward,
)


def make_backward(
    case: Case, *, dtype: torch.dtype = torch.float32, impl: str = "triton"
) -> FusedExpertsBackward:
    """Make the arguments of a backward, of numbers that ``dtype`` has."""
    x, ids, *others = make_inputs(case, dtype=dtype)
    columns = others[1].shape[1]
    dout = torch.randn(case.num_tokens, case.dim).to(dtype)
    projected = torch.randn(*ids.shape, columns).to(dtype)
    needs = {"needs_gate_up": True, "needs_down": True}
    made = FusedExpertsBackward(
        *(x.contiguous(), ids, *others, None, None, projected, dout),
        **(case.options() | needs),
        impl=impl,
    )
    return replace(made, projected=made_by_forward(made, "torch")[1])


def made_by_forward(x: FusedExpertsBackward, impl: str) -> tuple[Tensor, Tensor]:
    """Call the forward with what its backward is given."""
    args = (x.x, x.expert_ids, x.expert_weights, x.gate_up, x.down, None, None)
    bounds = {"activation": x.activation, "limit": x.limit, "softcaps": x.softcaps}
    return fused_experts_forward(*args, **bounds, impl=impl)


def made_by_both(x: FusedExpertsBackward, impl: str) -> tuple[Tensor, ...]:
    """Call the forward, and the backward of its products; these have any rows past the last."""
    out, projected = made_by_forward(x, impl)
    given = {each.name: getattr(x, each.name) for each in fields(x)}
    return out, *fused_experts_backward(**given | {"projected": projected, "impl": impl})
