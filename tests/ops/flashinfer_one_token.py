"""How FlashInfer's recurrences of one token are tested: steps, what is planned for them, and what a
translation to its functions must give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.contract import written_slots
from tests.ops.step_lengths import step_lengths
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.planning import Planned


def plan_for(implementation: Implementation, inputs: Any, **sizes: int) -> Planned:
    planner = implementation.load_planner()
    assert planner is not None
    slots = {"initial_indices": inputs.initial_indices, "state_indices": inputs.state_indices}
    return planner(step_lengths(inputs.cu_seqlens, len(inputs.q), **slots), **sizes)


def tensors_of(planned: Planned, device: str = "cpu") -> list[Tensor]:
    """What the op is given of a plan."""
    return [*(x.to(device) for x in planned.tensors), torch.tensor(planned.values)]


def held(inputs: Any) -> Any:
    """The same step where every sequence carries on from a slot, and one from another's."""
    inputs = replace(inputs.copy(), initial_indices=inputs.state_indices.clone())
    inputs.state.nan_to_num_(0.5)
    inputs.initial_indices[0] = len(inputs.state) - 1
    return inputs


def check_translated(out: Tensor, state: Tensor, inputs: Any, out_expected: Tensor, expected: Any):
    """Outputs, written slots, rows of padding and all else."""
    torch.testing.assert_close(out, out_expected, rtol=2**-9, atol=2**-9)
    written = written_slots(inputs).long()
    torch.testing.assert_close(state[written], expected.state[written], rtol=1e-5, atol=1e-5)
    state[written] = inputs.state[written]
    assert torch.equal(state.nan_to_num(), inputs.state.nan_to_num())
