"""What every implementation of a delta rule's decode step is held to."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from tests.ops.contract import written_slots
from tests.ops.delta_rule.step_cases import Case
from tests.ops.delta_rule.step_family import Family
from tests.ops.step_contract import StepContract, assert_same_pools


class DeltaStepContract(StepContract):
    """The tests of every step, and those by its parts."""

    family: ClassVar[Family]

    def test_the_reference_is_its_parts(self, case: Case):
        """The convolution's op and, of the rule and what a layer does, the definitions."""
        inputs = self.family.make_inputs(case)
        parts = inputs.copy()
        num_tokens = int(inputs.cu_seqlens[-1])
        out, expected = self.family.by_reference(inputs), self.family.by_parts(parts, "torch")
        torch.testing.assert_close(out[:num_tokens], expected[:num_tokens])
        slots = written_slots(inputs)
        assert torch.equal(inputs.conv_state[slots], parts.conv_state[slots])
        torch.testing.assert_close(inputs.state[slots], parts.state[slots])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_states_are_those_of_the_parts_where_gates_are(
        self, native_impl: str, dtype: torch.dtype
    ):
        """To the last bit, and what is read from them within what the norm rounds."""
        inputs = self.family.make_inputs(self.family.cases["mixed"], dtype)
        # Gates that no exponential rounds: rates of 0, and steps of a half and of one.
        b = torch.where(inputs.b > 0, 200, 0).to(dtype)
        inputs = replace(inputs, A_log=torch.full_like(inputs.A_log, -torch.inf), b=b)
        parts = inputs.copy()
        out, expected = self.family.run(inputs, native_impl), self.family.by_parts(parts, "cpp")
        assert_same_pools(inputs, parts)
        num_tokens = int(inputs.cu_seqlens[-1])
        torch.testing.assert_close(out[:num_tokens], expected[:num_tokens])
