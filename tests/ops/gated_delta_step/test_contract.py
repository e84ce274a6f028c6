"""What every implementation of the gated delta rule's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.ops.delta_step_contract import DeltaStepContract
from tests.ops.gated_delta_step.cases import case, make_inputs
from tests.ops.gated_delta_step.family import FAMILY


class TestContract(DeltaStepContract):
    family = FAMILY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 8, 16)}, "qkv must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        ({"conv_weight": torch.zeros(128, 9)}, "conv_weight must have width 2 to 8, got 9"),
        (
            {"qkv": torch.zeros(2, 120)},
            "qkv must have 2 H 16 + 64 channels, where H divides the 4 heads of state, got 120",
        ),
        (
            {"qkv": torch.zeros(2, 160)},
            "qkv must have 2 H 16 + 64 channels, where H divides the 4 heads of state, got 160",
        ),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")
