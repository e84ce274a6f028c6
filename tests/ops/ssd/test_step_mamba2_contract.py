"""What every implementation of the Mamba2 mixer's decode step is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.contract import written_slots
from tests.ops.ssd.step_mamba2_cases import CASES, FAMILY, GATES, Case, make_inputs
from tests.ops.step_contract import StepContract
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.ssd import ssd


class TestContract(StepContract):
    family = FAMILY


@pytest.mark.parametrize("gate", GATES)
def test_the_reference_is_its_parts(gate: str):
    """In float64: the convolution's op and, of the recurrence and what a layer does, the
    definitions."""
    case = replace(CASES["mixed"], gate=gate, dt_min=0.1, dt_max=2.0)
    inputs = make_inputs(case)
    parts = inputs.copy()
    num_tokens, num_heads = parts.dt.shape
    _, _, v_dim, k_dim = parts.state.shape
    index = (parts.cu_seqlens, parts.initial_indices, parts.state_indices)
    weights = (parts.conv_weight, parts.conv_bias, parts.conv_state)
    mixed = causal_conv1d(parts.xBC, *weights, *index, activation="silu", impl="torch")
    x, B, C = mixed.split([num_heads * v_dim, 2 * k_dim, 2 * k_dim], 1)
    dt = F.softplus(parts.dt + parts.dt_bias).clamp(0.1, 2.0)
    o = ssd(
        C.view(num_tokens, -1, k_dim),
        B.view(num_tokens, -1, k_dim),
        x.view(num_tokens, -1, v_dim),
        dt * -parts.A_log.exp(),
        dt,
        parts.D,
        parts.state,
        *index,
        scale=1.0,
        impl="recurrent_torch",
    ).flatten(1)

    def norm(y: Tensor) -> Tensor:
        groups = y.unflatten(1, (2, -1))
        return F.rms_norm(groups, groups.shape[2:], eps=1e-5).flatten(1) * parts.norm_weight

    expected = {
        "before_norm": lambda: norm(o * F.silu(parts.z)),
        "after_norm": lambda: norm(o) * F.silu(parts.z),
        "no_norm": lambda: o * F.silu(parts.z),
        "none": lambda: o,
    }[gate]()
    out = FAMILY.by_reference(inputs)
    torch.testing.assert_close(out, expected)
    slots = written_slots(inputs)
    assert torch.equal(inputs.conv_state[slots], parts.conv_state[slots])
    torch.testing.assert_close(inputs.state[slots], parts.state[slots])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xBC": torch.zeros(2, 8, 16)}, "xBC must have 2 dimensions, got [2, 8, 16]"),
        ({"state": torch.zeros(5, 4, 16)}, "state must have 4 dimensions, got [5, 4, 16]"),
        ({"conv_weight": torch.zeros(128, 9)}, "conv_weight must have width 2 to 8, got 9"),
        (
            {"xBC": torch.zeros(2, 120)},
            "xBC must have 64 + 2 G 16 channels, where G divides the 4 heads of state, got 120",
        ),
        (
            {"xBC": torch.zeros(2, 160)},
            "xBC must have 64 + 2 G 16 channels, where G divides the 4 heads of state, got 160",
        ),
        (
            {"z": None},
            "norm_weight must be None where z is None: what is normed has a gate",
        ),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
        ({"dt_min": 0.5, "dt_max": 0.1}, "dt_min and dt_max must rise from 0, got 0.5 and 0.1"),
        ({"norm_groups": 3}, "norm_groups must divide the 64 channels of x, got 3"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(1, 1))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")
