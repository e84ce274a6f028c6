"""The contract of gated_pooling, held by every implementation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from tests.ops.contract import assert_within_budget, impl_fixture
from tests.ops.gated_pooling.cases import CASES, Case, Inputs, make_inputs
from tests.ops.pages import offsets
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.gated_pooling import gated_pooling, reference
from torch_hybrid.ops.gated_pooling.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
impl = impl_fixture(IMPLEMENTATIONS)


def pool(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor]:
    """The keys, and the state afterwards."""
    args = inputs.args()
    return gated_pooling(*args, impl=impl), args[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(impl: str, name: str, dtype: str):
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    inputs = make_inputs(CASES[name], dtype=DTYPES[dtype], padding=(3, 2))
    exact = reference.gated_pooling(inputs.exact())
    oracle = inputs.fresh()
    expected = reference.gated_pooling(oracle)
    out, state = pool(inputs, impl)
    assert_within_budget(out, exact, expected)
    assert torch.equal((out != 0).any(1), (expected != 0).any(1))
    torch.testing.assert_close(state, oracle.state, atol=0, rtol=0, equal_nan=True)


@torch.no_grad()
def test_the_reference_is_transformers():
    config = Glm5NextTextConfig(index_kpool=4, index_topk=8, index_head_dim=24)
    with torch.device("meta"):
        indexer = Glm5NextTextIndexer(config, layer_idx=0)
    inputs = make_inputs(Case(lengths=((22, 22),)))
    indexer.index_kpool_compress_ape = torch.nn.Parameter(inputs.bias)
    packed = torch.cat([inputs.keys, inputs.gates, torch.ones(22, 1)], 1)
    expected, _, _ = indexer.get_pooled_states(packed[None])
    out = reference.gated_pooling(inputs)
    torch.testing.assert_close(out[3::4], expected[0])


def test_segments_are_the_whole(impl: str):
    """Cutting a text anywhere, also into pieces shorter than a block, changes nothing."""
    whole = make_inputs(Case(block_size=6, lengths=((50, 50),)))
    expected, expected_state = pool(whole, impl)
    state, outs = whole.state, []
    for start, end in pairwise([0, 1, 3, 20, 21, 24, 50]):
        piece = replace(
            whole,
            keys=whole.keys[start:end],
            gates=whole.gates[start:end],
            state=state,
            cu_seqlens=offsets([end - start]),
            seq_lens=torch.tensor([end]).int(),
            initial_indices=whole.state_indices * (start > 0),
        )
        out, state = pool(piece, impl)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), expected, atol=1e-6, rtol=1e-6)
    if BATCH_INVARIANT in IMPLEMENTATIONS[impl].capability.features:
        assert torch.equal(torch.cat(outs), expected)
    slot = int(whole.state_indices[0])
    assert torch.equal(state[slot, :2], expected_state[slot, :2])


def test_large_gates_do_not_overflow(impl: str):
    inputs = make_inputs(CASES["mixed"])
    out, _ = pool(replace(inputs, gates=inputs.gates * 1e4), impl)
    assert out.isfinite().all()
    assert out.abs().max() < inputs.keys.abs().max() + 4
