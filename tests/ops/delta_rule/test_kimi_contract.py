"""What every implementation of both execution forms of Kimi delta attention is held to."""

from __future__ import annotations

import re
from dataclasses import replace

import expecttest
import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from tests.ops.delta_rule.contract import DeltaRuleContract
from tests.ops.delta_rule.kimi import CASES, case, make_inputs
from tests.ops.recurrent_contract import Family, schemas
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 16)}, "q must have 3 dimensions, got [8, 16]"),
        ({"k": torch.zeros(8, 2, 12)}, "k must have shape [8, 2, 16], got [8, 2, 12]"),
        ({"v": torch.zeros(7, 2, 16)}, "v must have shape [8, 2, 16], got [7, 2, 16]"),
        ({"v": torch.zeros(8, 4, 16)}, "v must have shape [8, 2, 16], got [8, 4, 16]"),
        ({"g": torch.zeros(8, 2)}, "g must have shape [8, 2, 16], got [8, 2]"),
        ({"beta": torch.zeros(8, 3)}, "beta must have shape [8, 2], got [8, 3]"),
        (
            {"state": torch.zeros(5, 2, 16, 8)},
            "state must have shape [5, 2, 16, 16], got [5, 2, 16, 8]",
        ),
        ({"v": torch.zeros(8, 2, 16).half()}, "v must have dtype torch.float32, got torch.float16"),
        (
            {"cu_seqlens": torch.zeros(3, dtype=torch.int64)},
            "cu_seqlens must have dtype torch.int32, got torch.int64",
        ),
        (
            {"q": torch.zeros(8, 16, 2).mT},
            "q must have contiguous rows, got strides [32, 1, 2]",
        ),
        (
            {"g": torch.zeros(8, 16, 2).mT},
            "g must have contiguous rows, got strides [32, 1, 2]",
        ),
        (
            {"state": torch.zeros(5, 2, 16, 16).mT},
            "state must be contiguous, got strides [512, 256, 1, 16]",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], message: str):
    inputs = replace(make_inputs(case(5, 3)), **changes)
    for op in (recurrent_kimi_delta_attention, chunk_kimi_delta_attention):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            op(*inputs.args(), **inputs.options(), impl="torch")


def test_options_are_checked():
    inputs = make_inputs(case(2))
    with pytest.raises(ValueError, match="impl must be one of"):
        recurrent_kimi_delta_attention(*inputs.args(), **inputs.options(), impl="none")
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


class TestSchemas(expecttest.TestCase):
    def test_schemas(self):
        self.assertExpectedInline(
            schemas(recurrent_kimi_delta_attention, chunk_kimi_delta_attention),
            """\
torch_hybrid::recurrent_kimi_delta_attention(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor beta
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  float scale
  bool qk_l2norm
  str impl) -> Tensor
torch_hybrid::chunk_kimi_delta_attention(Tensor q
  Tensor k
  Tensor v
  Tensor g
  Tensor beta
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  float scale
  bool qk_l2norm
  int chunk_size
  str impl
  Tensor[]? planned=None) -> Tensor""",
        )
