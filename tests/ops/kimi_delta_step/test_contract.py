"""What every implementation of Kimi delta attention's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.ops.delta_step_contract import DeltaStepContract
from tests.ops.kimi_delta_step.cases import case, make_inputs
from tests.ops.kimi_delta_step.family import FAMILY


class TestContract(DeltaStepContract):
    family = FAMILY

    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize("step", [-200.0, -20.0, -1e-3, 0.0, 30.0, 200.0])
    def test_any_decay(self, host_impl: str, step: float, bound: float | None):
        """Channels that forget nothing, or all: as exact as the reference for each."""
        shape = replace(case(1, gate_lower_bound=bound), num_padding_tokens=1)
        inputs = make_inputs(shape)
        inputs = replace(inputs, a=torch.zeros_like(inputs.a), dt_bias=inputs.dt_bias * 0 + step)
        exact, own = inputs.exact(), inputs.copy()
        FAMILY.by_reference(exact)
        FAMILY.run(own, host_impl)
        slot = inputs.state_indices
        torch.testing.assert_close(
            own.state[slot].double(), exact.state[slot], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(2, 64)}, "qkv must have 96 channels, those of state, got 64"),
        ({"state": torch.zeros(5, 2, 16)}, "state must have 4 dimensions, got [5, 2, 16]"),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"rule": {"gate_lower_bound": 0.5}}, "gate_lower_bound must be at most 0, got 0.5"),
        (
            {"rule": {"gate_lower_bound": float("nan")}},
            "gate_lower_bound must be at most 0, got nan",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(case(1, 1)), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")
