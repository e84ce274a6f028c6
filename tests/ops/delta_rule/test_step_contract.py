"""What every implementation of the delta rules' decode steps is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.ops.delta_rule.step_contract import DeltaStepContract
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from tests.ops.delta_rule.step_kimi_cases import case

# Changes of a call, and what they raise.
GATED_ERRORS = [
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
]
KIMI_ERRORS = [
    ({"qkv": torch.zeros(2, 64)}, "qkv must have 96 channels, those of state, got 64"),
    ({"state": torch.zeros(5, 2, 16)}, "state must have 4 dimensions, got [5, 2, 16]"),
    ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
    ({"gate_lower_bound": 0.5}, "gate_lower_bound must be at most 0, got 0.5"),
    ({"gate_lower_bound": float("nan")}, "gate_lower_bound must be at most 0, got nan"),
]


class TestGated(DeltaStepContract):
    family = GATED


class TestKimi(DeltaStepContract):
    family = KIMI

    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize("step", [-200.0, -20.0, -1e-3, 0.0, 30.0, 200.0])
    def test_any_decay(self, host_impl: str, step: float, bound: float | None):
        """Channels that forget nothing, or all: as exact as the reference for each."""
        shape = replace(case(1, gate_lower_bound=bound), num_padding_tokens=1)
        inputs = KIMI.make_inputs(shape)
        inputs = replace(inputs, a=torch.zeros_like(inputs.a), dt_bias=inputs.dt_bias * 0 + step)
        exact, own = inputs.exact(), inputs.copy()
        KIMI.by_reference(exact)
        KIMI.run(own, host_impl)
        slot = inputs.state_indices
        torch.testing.assert_close(
            own.state[slot].double(), exact.state[slot], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [(f, *error) for f, errors in ((GATED, GATED_ERRORS), (KIMI, KIMI_ERRORS)) for error in errors],
)
def test_errors_name_the_argument(family: Family, changes: dict[str, object], message: str):
    inputs = replace(family.mixed(lengths=(1, 1), num_padding_tokens=0), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        family.run(inputs, "torch")
