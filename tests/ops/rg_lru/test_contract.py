"""What every implementation of the real-gated linear recurrent unit is held to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tests.ops.rg_lru.cases import CASES, Case, make_inputs
from tests.ops.vector_state_contract import Family, VectorStateContract
from torch_hybrid.ops.rg_lru import rg_lru
from torch_hybrid.ops.rg_lru.op import IMPLEMENTATIONS
from torch_hybrid.ops.rg_lru.reference import rg_lru_reference

FAMILY = Family(
    op=rg_lru,
    implementations=IMPLEMENTATIONS,
    reference=rg_lru_reference,
    cases=CASES,
    make_inputs=make_inputs,
)


class TestContract(VectorStateContract):
    family = FAMILY

    def test_decays_of_nearly_one(self, impl: str):
        """What is added is as exact as its decay is far from 1: no digits are lost in 1 - a^2."""
        inputs = make_inputs(Case(lengths=(40,)))
        inputs = replace(inputs, log_a=inputs.log_a * 1e-6, state_indices=inputs.state_indices * 0)
        inputs = replace(inputs, state=torch.zeros_like(inputs.state))
        exact = rg_lru_reference(inputs.exact())
        torch.testing.assert_close(
            self.family.run(inputs, impl).double(), exact, rtol=1e-4, atol=1e-9
        )

    def test_the_first_token_of_a_new_sequence_is_not_scaled(self, impl: str):
        inputs = make_inputs(Case(lengths=(1, 1)))
        assert inputs.initial_indices.tolist()[1] == 0
        out = self.family.run(inputs, impl)
        input_gate = inputs.gates.sigmoid().chunk(2, dim=-1)[0].flatten(1)
        torch.testing.assert_close(out[1], (input_gate * inputs.x)[1])
        assert (out[0] - (input_gate * inputs.x)[0]).abs().max() > 0.1


def test_heads_divide_the_channels():
    inputs = replace(make_inputs(Case(lengths=(5, 3))), gates=torch.zeros(8, 5, 20))
    with pytest.raises(ValueError, match=r"^gates must have heads that divide 48 channels, got 5$"):
        FAMILY.run(inputs, "torch")


def test_reference_agrees_with_transformers():
    """From nothing, and on from a state."""
    inputs = make_inputs(Case(lengths=(30,), num_heads=3, head_dim=16))
    rng = torch.Generator().manual_seed(1)
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=48, num_attention_heads=3))
    for weight in theirs.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=rng) * 0.5)
    heads = inputs.x.view(30, 3, 16)
    gates = [
        torch.einsum("thb,hbo->tho", heads, weight) + bias
        for weight, bias in (
            (theirs.input_gate_weight, theirs.input_gate_bias),
            (theirs.recurrent_gate_weight, theirs.recurrent_gate_bias),
        )
    ]
    inputs = replace(
        inputs,
        gates=torch.cat(gates, dim=-1).detach(),
        log_a=-8 * F.softplus(theirs.recurrent_param.detach()),
    )
    slot = inputs.state_indices[0]
    theirs.recurrent_states = inputs.state[slot][None].clone()
    for initial, first in ((inputs.initial_indices, 1), (inputs.initial_indices * 0, 0)):
        expected = theirs(inputs.x[None], torch.arange(first, 30 + first)[None])[0].detach()
        out = rg_lru_reference(replace(inputs, initial_indices=initial))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            inputs.state[slot], theirs.recurrent_states[0].detach(), rtol=1e-4, atol=1e-5
        )
