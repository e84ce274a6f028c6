"""What every implementation of RWKV's weighted average is held to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from tests.ops.vector_state_contract import Family, VectorStateContract
from tests.ops.wkv.cases import CASES, Case, make_inputs
from torch_hybrid.ops.wkv import wkv
from torch_hybrid.ops.wkv.op import IMPLEMENTATIONS
from torch_hybrid.ops.wkv.reference import wkv_reference

FAMILY = Family(
    op=wkv,
    implementations=IMPLEMENTATIONS,
    reference=wkv_reference,
    cases=CASES,
    make_inputs=make_inputs,
)


class TestContract(VectorStateContract):
    family = FAMILY

    def test_keys_that_no_exponential_holds(self, impl: str):
        """Weights of e^300 and of e^-300, after one another and beside a state of either."""
        inputs = make_inputs(Case(lengths=(40, 40)))
        sizes = torch.tensor([300.0, -300.0, 0.0]).repeat(27)[:80, None]
        inputs = replace(inputs, k=inputs.k + sizes, bonus=inputs.bonus * 100)
        inputs.state[:, 2] *= 300
        expected = self.family.expect(inputs)
        expected.check(self.family.run(inputs, impl), inputs.state)
        assert expected.out_exact.isfinite().all()

    @pytest.mark.parametrize("log_decay", [0.0, -1e-6, -1e3, -1e30])
    def test_any_decay(self, impl: str, log_decay: float):
        inputs = make_inputs(Case(lengths=(40, 3)))
        inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, log_decay))
        expected = self.family.expect(inputs)
        expected.check(self.family.run(inputs, impl), inputs.state)

    def test_the_first_token_of_a_new_sequence_is_its_own_mean(self, impl: str):
        inputs = make_inputs(Case(lengths=(1, 1)))
        assert inputs.initial_indices.tolist()[1] == 0
        out = self.family.run(inputs, impl)
        torch.testing.assert_close(out[1], inputs.v[1])
        assert (out[0] - inputs.v[0]).abs().max() > 0.1


def test_reference_agrees_with_transformers():
    """From nothing, and on from a state."""
    inputs = make_inputs(Case(lengths=(30,), num_channels=16))
    slot = inputs.state_indices[0]
    for initial in (inputs.initial_indices, inputs.initial_indices * 0):
        before = inputs.state[slot].clone()[:, None].unbind() if initial[0] else None
        expected, after = rwkv_linear_attention_cpu(
            (-inputs.log_decay).log(),
            inputs.bonus,
            inputs.k[None],
            inputs.v[None],
            state=before,
            return_state=True,
        )
        out = wkv_reference(replace(inputs, initial_indices=initial))
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(inputs.state[slot], torch.cat(after))
