"""What every implementation of both execution forms of Kimi delta attention is held to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from tests.ops.delta_rule.contract import DeltaRuleContract
from tests.ops.delta_rule.kimi import CASES, case, make_inputs
from tests.ops.recurrent_contract import Family
from torch_hybrid.ops.delta_rule import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from torch_hybrid.ops.delta_rule.op import (
    KIMI_CHUNK_IMPLEMENTATIONS,
    KIMI_RECURRENT_IMPLEMENTATIONS,
)
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference


class TestContract(DeltaRuleContract):
    family = Family(
        recurrent=recurrent_kimi_delta_attention,
        recurrent_implementations=KIMI_RECURRENT_IMPLEMENTATIONS,
        chunk=chunk_kimi_delta_attention,
        chunk_implementations=KIMI_CHUNK_IMPLEMENTATIONS,
        reference=delta_rule_reference,
        cases=CASES,
        make_inputs=make_inputs,
    )


def test_options_are_checked():
    inputs = make_inputs(case(2))
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        chunk_kimi_delta_attention(*inputs.args(), **inputs.options(), chunk_size=20, impl="torch")


@pytest.mark.parametrize("oracle", ["recurrent", "chunk"])
@pytest.mark.parametrize("strongest", [-0.1, -5.0])
def test_reference_agrees_with_transformers(oracle: str, strongest: float):
    """Their state is [K, V], their layout [batch, T, H, K], and their scale is K ** -0.5."""
    inputs = make_inputs(case(70, num_heads=3, k_dim=24, v_dim=16))
    inputs = replace(inputs, g=strongest * torch.rand(inputs.g.shape))
    slot = int(inputs.state_indices[0])
    initial = inputs.state[slot].mT[None].contiguous()
    out = delta_rule_reference(inputs)
    theirs, final = getattr(kimi_linear, f"{oracle}_kimi_delta_attention")(
        *(x[None] for x in inputs.args()[:3]),
        g=inputs.g[None],
        beta=inputs.beta[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.state[slot], final[0].mT, rtol=1e-5, atol=1e-5)
