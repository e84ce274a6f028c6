"""What every implementation of the gated delta rule's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

import expecttest
import pytest
import torch

from tests.ops.delta_rule.step_contract import DeltaStepContract
from tests.ops.delta_rule.step_gated_cases import case, make_inputs
from tests.ops.delta_rule.step_gated_family import FAMILY
from tests.ops.recurrent_contract import schemas
from torch_hybrid.ops.delta_rule import gated_delta_step


class TestContract(DeltaStepContract):
    family = FAMILY
    opchecked: ClassVar = {"mixed": replace(FAMILY.cases["mixed"], has_bias=True)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 8, 16)}, "qkv must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        ({"conv_weight": torch.zeros(128, 9)}, "conv_weight must have width 2 to 8, got 9"),
        ({"conv_weight": torch.zeros(96, 4)}, "conv_weight must have shape [128, 4], got [96, 4]"),
        (
            {"qkv": torch.zeros(2, 120)},
            "qkv must have 2 H 16 + 64 channels, where H divides the 4 heads of state, got 120",
        ),
        (
            {"qkv": torch.zeros(2, 160)},
            "qkv must have 2 H 16 + 64 channels, where H divides the 4 heads of state, got 160",
        ),
        ({"z": torch.zeros(2, 60)}, "z must have shape [2, 64], got [2, 60]"),
        ({"a": torch.zeros(2, 4).half()}, "a must have dtype torch.float32, got torch.float16"),
        (
            {"dt_bias": torch.zeros(4).half()},
            "dt_bias must have dtype torch.float32, got torch.float16",
        ),
        ({"norm_weight": torch.zeros(4)}, "norm_weight must have shape [16], got [4]"),
        (
            {"conv_state": torch.zeros(4, 3, 128)},
            "conv_state must have shape [5, 3, 128], got [4, 3, 128]",
        ),
        (
            {"conv_state": torch.zeros(5, 128, 3).mT},
            "conv_state must be contiguous, got strides [384, 1, 3]",
        ),
        (
            {"state_indices": torch.zeros(2)},
            "state_indices must have dtype torch.int32, got torch.float32",
        ),
        ({"qkv": torch.zeros(128, 2).T}, "qkv must have contiguous rows, got strides [1, 2]"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")


class TestSchema(expecttest.TestCase):
    def test_schema(self):
        self.assertExpectedInline(
            schemas(gated_delta_step),
            """\
torch_hybrid::gated_delta_step(Tensor qkv
  Tensor z
  Tensor b
  Tensor a
  Tensor conv_weight
  Tensor? conv_bias
  Tensor A_log
  Tensor dt_bias
  Tensor norm_weight
  Tensor(a!) conv_state
  Tensor(b!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  str activation
  float scale
  float beta_scale
  float norm_eps
  str gate="silu"
  str impl
  Tensor(c!)? records=None
  Tensor? accepted=None) -> Tensor""",
        )
