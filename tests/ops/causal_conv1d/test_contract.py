"""What every implementation of the causal convolution is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.ops.causal_conv1d.cases import CASES, Case, make_inputs
from tests.ops.contract import assert_same_bits
from tests.ops.vector_state_contract import Family, VectorStateContract
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS
from torch_hybrid.ops.causal_conv1d.reference import causal_conv1d_reference

_NO_PROJECTIONS = lfm2.Lfm2Config(
    hidden_size=CASES["lfm2"].channels, num_hidden_layers=1, layer_types=["conv"]
)
FAMILY = Family(
    op=causal_conv1d,
    implementations=IMPLEMENTATIONS,
    reference=causal_conv1d_reference,
    cases=CASES,
    make_inputs=make_inputs,
    cut=("shorter_than_the_state", "gates", "token_taps"),
)


class TestContract(VectorStateContract):
    family = FAMILY

    @pytest.mark.parametrize("gate", ["input_gate", "output_gate"])
    def test_one_gate_alone(self, impl: str, gate: str):
        """The other is all ones."""
        inputs = make_inputs(CASES["gates"])
        one = replace(inputs.copy(), **{gate: None})
        both = replace(inputs.copy(), **{gate: torch.ones_like(inputs.x)})
        torch.testing.assert_close(self.family.run(one, impl), self.family.run(both, impl))
        assert_same_bits(one.conv_state, both.conv_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": torch.zeros(40, 17), "conv_state": torch.zeros(5, 16, 40)},
            "weight must have width 2 to 16, got 17",
        ),
        (
            {"input_gate": torch.zeros(8, 20)},
            "input_gate must have shape [8, 40], got [8, 20]",
        ),
        (
            {"output_gate": torch.zeros(8, 40).half()},
            "output_gate must have dtype torch.float32, got torch.float16",
        ),
        (
            {"output_gate": torch.zeros(40, 8).T},
            "output_gate must have contiguous rows, got strides [1, 8]",
        ),
        (
            {"token_taps": torch.zeros(8, 2, 3)},
            "token_taps must have shape [8, 2, 4], got [8, 2, 3]",
        ),
        (
            {"token_taps": torch.zeros(8, 3, 4)},
            "token_taps must have heads that divide 40 channels, got 3",
        ),
        (
            {"token_taps": torch.zeros(8, 2, 4), "input_gate": torch.zeros(8, 40)},
            "token_taps must be of a convolution without gates",
        ),
        ({"activation": "gelu"}, "activation must be one of ['none', 'silu'], got 'gelu'"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(5, 3))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FAMILY.run(inputs, "torch")


@pytest.mark.parametrize("width", [2, 4, 7])
def test_reference_agrees_with_conv1d(width: int):
    """torch pads with zeros on the left where a sequence starts from nothing."""
    inputs = make_inputs(Case(lengths=(30,), width=width, has_bias=True, activation="none"))
    inputs = replace(inputs, initial_indices=torch.zeros(1, dtype=torch.int32))
    out = causal_conv1d_reference(inputs)
    padded = F.pad(inputs.x.T, (width - 1, 0))
    theirs = F.conv1d(padded, inputs.weight[:, None], inputs.bias, groups=len(padded)).T
    torch.testing.assert_close(out, theirs)


def test_reference_with_gates_agrees_with_transformers():
    """A whole mixer between its projections."""
    inputs = make_inputs(replace(CASES["lfm2"], lengths=(30,)))
    inputs = replace(inputs, initial_indices=torch.zeros(1, dtype=torch.int32))
    theirs = lfm2.Lfm2ShortConv(_NO_PROJECTIONS, 0)
    theirs.in_proj, theirs.out_proj = torch.nn.Identity(), torch.nn.Identity()
    theirs.conv.weight.data.copy_(inputs.weight[:, None])
    mixed = torch.cat([inputs.input_gate, inputs.output_gate, inputs.x], dim=1)
    out = causal_conv1d_reference(inputs)
    torch.testing.assert_close(out, theirs(mixed[None])[0].detach())


def test_reference_with_taps_of_each_token_agrees_with_transformers():
    """Their taps begin at the token itself; they add it and divide what comes of it."""
    inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    inputs = make_inputs(replace(CASES["inkling2"], lengths=(30,)))
    inputs = replace(inputs, initial_indices=torch.zeros(1, dtype=torch.int32))
    num_heads = CASES["inkling2"].num_heads
    channels, width = inputs.weight.shape
    theirs = inkling2.Inkling2DynamicShortConvolution(channels, 1, num_heads, width, 0, 0)
    theirs.weight_proj = torch.nn.Identity()
    theirs.static_weight.data.copy_(inputs.weight.T.flip(0))
    given = inputs.token_taps.flip(2).flatten(1)[None]
    out = causal_conv1d_reference(inputs)
    expected = theirs(inputs.x[None], given)[0].detach()
    torch.testing.assert_close((out + inputs.x) / (2 * width + 1) ** 0.5, expected)


def test_reference_agrees_with_transformers():
    """Their state is [batch, C, W] and holds one input more, the oldest, which nothing reads."""
    inputs = make_inputs(Case(lengths=(1,), has_bias=True))
    slot = int(inputs.state_indices[0])
    oldest = torch.full_like(inputs.x, torch.nan)
    theirs = torch.cat([oldest, inputs.conv_state[slot]]).T[None].contiguous()
    out_theirs = qwen3_next.causal_conv1d_update(
        inputs.x.T[None], theirs, inputs.weight, inputs.bias, "silu"
    )
    out = causal_conv1d_reference(inputs)
    torch.testing.assert_close(out, out_theirs[0].T)
    assert torch.equal(inputs.conv_state[slot], theirs[0].T[1:])
