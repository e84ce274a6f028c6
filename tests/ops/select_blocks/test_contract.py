"""The contract of select_blocks, held by every implementation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.ops.contract import impl_fixture, impls_on
from tests.ops.select_blocks.cases import CASES, SMALL, Case, Inputs, make_inputs
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.select_blocks import reference, select_blocks
from torch_hybrid.ops.select_blocks.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))
impl = impl_fixture(IMPLEMENTATIONS)


def select(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor]:
    """The blocks, and the pool afterwards."""
    args = inputs.args()
    chosen = select_blocks(*args, block_size=inputs.block_size, top_k=inputs.top_k, impl=impl)
    return chosen, args[3]


@cache
def expected_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = make_inputs(case, dtype=dtype)
    return reference.select_blocks(inputs), inputs.block_keys


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_the_reference(impl: str, name: str, dtype: str):
    """Scores are whole numbers, so that every tie is one."""
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    case = CASES[name]
    expected, expected_pool = expected_of(case, DTYPES[dtype])
    chosen, pool = select(make_inputs(case, dtype=DTYPES[dtype]), impl)
    assert torch.equal(chosen, expected)
    assert_same_bits(pool, expected_pool)


def test_scores_that_round(impl: str):
    """Normal numbers, chosen as in float64 wherever the scores lie further apart than rounding."""
    case = CASES["glm5_next"]
    generator = torch.Generator().manual_seed(1)
    inputs = make_inputs(case, unused=0.0)
    inputs = replace(
        inputs,
        **{
            name: torch.randn(getattr(inputs, name).shape, generator=generator)
            for name in ("q", "keys", "weights", "block_keys")
        },
    )
    exact = reference.select_blocks(inputs.exact())
    assert torch.equal(select(inputs, impl)[0], exact)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_equals_whole(impl: str, chunk: int):
    case = replace(CASES["long_extend"], lengths=((130, 130),))
    whole = make_inputs(case)
    expected, expected_pool = select(whole, impl)
    parts, pool = whole.in_pieces(chunk, lambda piece: select(piece, impl))
    assert torch.equal(torch.cat(parts), expected)
    assert_same_bits(pool, expected_pool)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_rounded_scores_are_the_same_in_any_call(impl: str, dtype: str):
    """Blocks whose keys are the same numbers in another order: their scores tie but for rounding,
    which depends on the order of a sum's terms alone."""
    case = Case(num_heads=3, index_dim=48, block_size=1, top_k=3, lengths=((30, 30),))
    inputs, generator = make_inputs(case, dtype=DTYPES[dtype]), torch.Generator().manual_seed(0)
    numbers = torch.randn(48, generator=generator).to(DTYPES[dtype])
    keys = torch.stack([numbers[torch.randperm(48, generator=generator)] for _ in range(30)])
    whole = replace(inputs, q=torch.ones_like(inputs.q), keys=keys)
    expected, _ = select(whole, impl)
    for size in (1, 19):
        parts, _ = whole.in_pieces(size, lambda piece: select(piece, impl))
        assert torch.equal(torch.cat(parts), expected)


def test_at_least_one_block_is_chosen():
    args = make_inputs(SMALL).args()
    with pytest.raises(ValueError, match="block_size and top_k must be at least 1, got 4 and 0"):
        select_blocks(*args, block_size=4, top_k=0, impl="torch")
