"""What every implementation of the lightning mixer's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.contract import written_slots
from tests.ops.ssd.step_lightning_cases import CASES, FAMILY, Case, make_inputs
from tests.ops.step_contract import StepContract
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.ops.ssd import ssd


class TestContract(StepContract):
    family = FAMILY


@pytest.mark.parametrize("name", ["mixed", "odd_dims", "minimax", "ungated"])
def test_the_reference_is_its_parts(name: str):
    """The recurrence's op, and what a layer does before and after it."""
    inputs = make_inputs(CASES[name])
    parts = inputs.copy()
    dim = parts.state.shape[-1]

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, x.shape[-1:], eps=1e-5) * weight

    qkv = F.silu(parts.qkv) if parts.activation == "silu" else parts.qkv
    q, k, v = qkv.unflatten(1, (3, -1, dim)).unbind(1)
    q, k = norm(q, parts.q_norm_weight), norm(k, parts.k_norm_weight)
    if parts.cos is not None:
        q, k = (rotate_halves(x, Rotary(parts.cos, parts.sin)) for x in (q, k))
    g = -parts.slopes.expand(len(q), -1)
    index = (parts.cu_seqlens, parts.initial_indices, parts.state_indices)
    options = {"scale": parts.scale, "impl": "recurrent_torch"}
    o = ssd(q, k, v, g, None, None, parts.state, *index, **options).flatten(1)
    if parts.gate is not None:
        groups = (parts.norm_groups, -1)
        o = norm(o.unflatten(1, groups), parts.norm_weight.unflatten(0, groups)).flatten(1)
        o = o * parts.gate.sigmoid()
    out = FAMILY.by_reference(inputs)
    torch.testing.assert_close(out, o)
    slots = written_slots(inputs)
    torch.testing.assert_close(inputs.state[slots], parts.state[slots])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 8, 16)}, "qkv must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        ({"gate": None}, "gate and norm_weight must both be given, or both be None"),
        (
            {"k_norm_weight": None},
            "q_norm_weight and k_norm_weight must both be given, or both be None",
        ),
        ({"sin": None}, "cos and sin must both be given, or both be None"),
        ({"cos": torch.zeros(2, 9)}, "cos must have at most 8 columns, got 9"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"norm_groups": 3}, "norm_groups must divide the 64 channels of o, got 3"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")
