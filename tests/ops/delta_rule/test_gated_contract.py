"""What every implementation of both execution forms of the gated delta rule is held to."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.ops.delta_rule.cases import Case
from tests.ops.delta_rule.contract import DeltaRuleContract
from tests.ops.delta_rule.gated import CASES, make_inputs
from tests.ops.recurrent_contract import Family
from torch_hybrid.ops.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from torch_hybrid.ops.delta_rule.op import (
    GATED_CHUNK_IMPLEMENTATIONS,
    GATED_RECURRENT_IMPLEMENTATIONS,
)
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference


class TestContract(DeltaRuleContract):
    family = Family(
        recurrent=recurrent_gated_delta_rule,
        recurrent_implementations=GATED_RECURRENT_IMPLEMENTATIONS,
        chunk=chunk_gated_delta_rule,
        chunk_implementations=GATED_CHUNK_IMPLEMENTATIONS,
        reference=delta_rule_reference,
        cases=CASES,
        make_inputs=make_inputs,
    )


def test_heads_must_divide():
    inputs = make_inputs(Case(lengths=(2,), num_k_heads=2, num_v_heads=3))
    with pytest.raises(ValueError, match="v must have a multiple of the 2 heads of k, got 3"):
        recurrent_gated_delta_rule(*inputs.args(), **inputs.options(), impl="torch")


def test_options_are_checked():
    inputs = make_inputs(Case(lengths=(2,)))
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        chunk_gated_delta_rule(*inputs.args(), **inputs.options(), chunk_size=20, impl="torch")


@pytest.mark.parametrize(
    "oracle", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
def test_reference_agrees_with_transformers(oracle: str):
    """Their state is [K, V], their layout [batch, T, H, K], and their scale is K ** -0.5."""
    inputs = make_inputs(Case(lengths=(70,), num_k_heads=2, num_v_heads=6, k_dim=24, v_dim=16))
    out = delta_rule_reference(inputs)
    slot = int(inputs.state_indices[0])
    initial = make_inputs(Case(lengths=(70,), num_k_heads=2, num_v_heads=6, k_dim=24, v_dim=16))
    theirs, final = getattr(qwen3_next, oracle)(
        *(x[None] for x in inputs.args()[:3]),
        g=inputs.g[None],
        beta=inputs.beta[None],
        initial_state=initial.state[slot].mT[None].contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.state[slot], final[0].mT, rtol=1e-5, atol=1e-5)
