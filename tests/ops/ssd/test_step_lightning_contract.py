"""What every implementation of the lightning mixer's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.ssd.step_lightning_cases import CASES, Case, make_inputs
from tests.ops.ssd.step_lightning_family import FAMILY
from tests.ops.step_contract import StepContract
from torch_hybrid.layers.rotary import Rotary, rotate_halves
from torch_hybrid.ops.ssd import recurrent_ssd


class TestContract(StepContract):
    family = FAMILY
    sliced = "qkv"
    opchecked: ClassVar = {name: CASES[name] for name in ("mixed", "ungated")}


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
    options = {"scale": parts.scale, "impl": "torch"}
    o = recurrent_ssd(q, k, v, g, None, None, parts.state, *index, **options).flatten(1)
    if parts.gate is not None:
        groups = (parts.norm_groups, -1)
        o = norm(o.unflatten(1, groups), parts.norm_weight.unflatten(0, groups)).flatten(1)
        o = o * parts.gate.sigmoid()
    out = FAMILY.by_reference(inputs)
    torch.testing.assert_close(out, o)
    slots = inputs.written_slots()
    torch.testing.assert_close(inputs.state[slots], parts.state[slots])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 8, 16)}, "qkv must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        (
            {"state": torch.zeros(5, 4, 16, 8)},
            "state must have shape [5, 4, 16, 16], got [5, 4, 16, 8]",
        ),
        ({"qkv": torch.zeros(2, 128)}, "qkv must have shape [2, 192], got [2, 128]"),
        ({"gate": torch.zeros(2, 60)}, "gate must have shape [2, 64], got [2, 60]"),
        ({"gate": None}, "gate and norm_weight must both be given, or both be None"),
        (
            {"k_norm_weight": None},
            "q_norm_weight and k_norm_weight must both be given, or both be None",
        ),
        ({"sin": None}, "cos and sin must both be given, or both be None"),
        ({"sin": torch.zeros(2, 3)}, "sin must have shape [2, 4], got [2, 3]"),
        ({"cos": torch.zeros(2, 9)}, "cos must have at most 8 columns, got 9"),
        (
            {"cos": torch.zeros(2, 4).double()},
            "cos must have dtype torch.float32, got torch.float64",
        ),
        ({"slopes": torch.zeros(3)}, "slopes must have shape [4], got [3]"),
        (
            {"slopes": torch.zeros(4).half()},
            "slopes must have dtype torch.float32, got torch.float16",
        ),
        (
            {"q_norm_weight": torch.zeros(16).half()},
            "q_norm_weight must have dtype torch.float32, got torch.float16",
        ),
        ({"norm_weight": torch.zeros(16)}, "norm_weight must have shape [64], got [16]"),
        (
            {"state_indices": torch.zeros(2)},
            "state_indices must have dtype torch.int32, got torch.float32",
        ),
        ({"qkv": torch.zeros(192, 2).T}, "qkv must have contiguous rows, got strides [1, 2]"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"norm_groups": 3}, "norm_groups must divide the 64 channels of o, got 3"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")


class TestSchema(expecttest.TestCase):
    def test_schema(self):
        schema = str(torch.ops.torch_hybrid.lightning_step.default._schema)
        self.assertExpectedInline(
            schema.replace(", ", "\n  "),
            """\
torch_hybrid::lightning_step(Tensor qkv
  Tensor? gate
  Tensor? q_norm_weight
  Tensor? k_norm_weight
  Tensor? cos
  Tensor? sin
  Tensor slopes
  Tensor? norm_weight
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  str activation
  float scale
  int norm_groups
  float norm_eps
  str impl
  Tensor(b!)? records=None
  Tensor? accepted=None) -> Tensor""",
        )
