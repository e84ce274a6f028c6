"""The contract of gated_pooling, held by every implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    impls_on,
    pool_clones,
    skip_reason,
)
from tests.ops.gated_pooling.cases import CASES, Case, Inputs, make_inputs
from tests.ops.pages import offsets
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.gated_pooling import gated_pooling, reference
from torch_hybrid.ops.gated_pooling.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=impls_on("cpu", IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> str:
    if reason := skip_reason(IMPLEMENTATIONS[request.param], "cpu"):
        pytest.skip(reason)
    return request.param


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


# ---- the op as the compiler sees it ----------------------------------------------------------


def test_schema():
    schema = str(torch.ops.torch_hybrid.gated_pooling.default._schema)
    assert_expected_inline(
        schema.replace(", ", ",\n"),
        """\
torch_hybrid::gated_pooling(Tensor keys,
Tensor gates,
Tensor bias,
Tensor(a!) state,
Tensor cu_seqlens,
Tensor seq_lens,
Tensor initial_indices,
Tensor state_indices,
*,
str impl) -> Tensor""",
    )


def test_opcheck(impl: str):
    inputs = make_inputs(CASES["mixed"])
    args = replace(inputs, state=inputs.state.nan_to_num(0.0)).args()
    torch.library.opcheck(torch.ops.torch_hybrid.gated_pooling.default, args, {"impl": impl})


def layers(impl: str) -> Callable[..., Tensor]:
    def step(keys: Tensor, *args: Tensor) -> Tensor:
        """Two steps of the same sequences."""
        first = gated_pooling(keys, *args, impl=impl)
        return first + gated_pooling(first + 1, *args, impl=impl)

    return step


def test_compiles_once(impl: str):
    # Sizes that are not tied to one another differ.
    batches = [
        make_inputs(Case(lengths=lengths)).args()
        for lengths in (
            ((1, 1), (90, 93), (9, 9), (3, 40), (18, 18)),
            ((1, 7),) * 6,
            ((64, 64), (5, 9), (7, 8)),
        )
    ]
    assert_traces_once(layers(impl), batches)


def test_no_pool_clone(impl: str):
    args = make_inputs(CASES["mixed"]).args()
    assert pool_clones(layers(impl), args, [args[3]]) == []


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, **changes: Tensor) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
        pool(replace(make_inputs(CASES["decode"]), **changes), impl)
    return str(error.value)


def test_error_texts():
    good = make_inputs(CASES["decode"])
    errors = [
        failing("torch", keys=good.keys[0]),
        failing("torch", keys=good.keys.long()),
        failing("torch", gates=good.gates[:3]),
        failing("torch", gates=good.gates.bfloat16()),
        failing("torch", bias=good.bias[:3]),
        failing("torch", bias=good.bias[:, :3]),
        failing("torch", state=good.state.double()),
        failing("torch", seq_lens=good.seq_lens.long()),
        failing("tpu"),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
keys must have 2 dimensions, got [24]
keys must be a floating point tensor, got torch.int64
gates must have shape [5, 24], got [3, 24]
gates must have dtype torch.float32, got torch.bfloat16
state must have shape [15, 2, 2, 24], got [15, 3, 2, 24]
bias must have shape [4, 24], got [4, 3]
state must have dtype torch.float32, got torch.float64
seq_lens must have dtype torch.int32, got torch.int64
impl must be one of ['cpp', 'triton', 'torch'], got 'tpu'""",
    )


def test_indices_out_of_range(impl: str):
    good = make_inputs(CASES["decode"])
    errors = [
        failing(impl, cu_seqlens=good.cu_seqlens + 1),
        failing(impl, seq_lens=good.seq_lens - 1),
        failing(impl, state_indices=good.state_indices + 90),
        failing(impl, initial_indices=good.initial_indices - 90),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
cu_seqlens must rise from 0 to at most 5, got [1, 2, 3, 4, 5, 6]
seq_lens[0] must be at least its 1 new tokens, got 0
state_indices must be in [0, 15), got 97
initial_indices must be in [0, 15), got -90""",
    )
