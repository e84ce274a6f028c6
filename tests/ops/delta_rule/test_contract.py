"""What every implementation of both execution forms of the delta rules is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.ops.delta_rule import gated, kimi
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.delta_rule.contract import DeltaRuleContract
from tests.ops.recurrent_contract import Family
from torch_hybrid.ops.delta_rule import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule import op as rules
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

GATED = Family(
    op=gated_delta_rule,
    implementations=rules.GATED_IMPLEMENTATIONS,
    reference=delta_rule_reference,
    cases=gated.CASES,
    make_inputs=gated.make_inputs,
)
KIMI = Family(
    op=kimi_delta_attention,
    implementations=rules.KIMI_IMPLEMENTATIONS,
    reference=delta_rule_reference,
    cases=kimi.CASES,
    make_inputs=kimi.make_inputs,
)


class TestGated(DeltaRuleContract):
    family = GATED


class TestKimi(DeltaRuleContract):
    family = KIMI


def test_heads_must_divide():
    inputs = gated.make_inputs(Case(lengths=(2,), num_k_heads=2, num_v_heads=3))
    with pytest.raises(ValueError, match="v must have a multiple of the 2 heads of k, got 3"):
        gated_delta_rule(*inputs.args(), **inputs.options(), impl="chunk_torch")


@pytest.mark.parametrize("family", [GATED, KIMI], ids=["gated", "kimi"])
def test_options_are_checked(family: Family):
    inputs = family.mixed()
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        family.op(*inputs.args(), **inputs.options(), chunk_size=20, impl="chunk_torch")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_reference_agrees_with_qwen3_next(form: str):
    shape = Case(lengths=(70,), num_k_heads=2, num_v_heads=6, k_dim=24, v_dim=16)
    oracle = getattr(qwen3_next, f"torch_{form}_gated_delta_rule")
    check_agrees(oracle, gated.make_inputs(shape))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("strongest", [-0.1, -5.0])
def test_reference_agrees_with_kimi_linear(form: str, strongest: float):
    inputs = kimi.make_inputs(kimi.case(70, num_heads=3, k_dim=24, v_dim=16))
    inputs = replace(inputs, g=strongest * torch.rand(inputs.g.shape))
    check_agrees(getattr(kimi_linear, f"{form}_kimi_delta_attention"), inputs)


def check_agrees(oracle: Callable[..., Any], inputs: Inputs) -> None:
    """Their state is [K, V], their layout [batch, T, H, K], and their scale is K ** -0.5."""
    slot = int(inputs.state_indices[0])
    initial = inputs.state[slot].mT[None].contiguous()
    out = delta_rule_reference(inputs)
    theirs, final = oracle(
        *(x[None] for x in inputs.args()[:3]),
        g=inputs.g[None],
        beta=inputs.beta[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.state[slot], final[0].mT, rtol=1e-5, atol=1e-5)
