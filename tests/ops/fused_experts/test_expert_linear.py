"""The contract of expert_linear, held by every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.block_scales import FP8_OPCHECKS
from tests.ops.contract import (
    assert_same_bits,
    assert_within_budget,
    impl_fixture,
    impls_on,
)
from tests.ops.fused_experts.cases import CASES, make_product
from tests.ops.integers import FORMATS
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, NO_FEATURES
from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts import reference_expert_linear
from torch_hybrid.ops.fused_experts.op_expert_linear import (
    IMPLEMENTATIONS,
    ExpertLinear,
    expert_linear,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ("decode", "odd_sizes", "prefill", "one_expert_for_all", "some_choices_empty", "no_tokens")
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))
impl = impl_fixture(IMPLEMENTATIONS, NO_FEATURES)


def run(given: list[Any], impl: str) -> Tensor:
    *args, scales = given
    return expert_linear(*args, scales=scales, impl=impl)


def reference(x: Tensor, ids: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
    """Row by row, in x's dtype; weights without scales are of another dtype there."""
    weight = weight.to(x.dtype) if scales is None else weight
    return reference_expert_linear.expert_linear(
        ExpertLinear(x, ids, weight, scales=scales, impl="")
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [None, "fp8", *FORMATS])
@pytest.mark.parametrize("name", NAMES)
def test_matches_float64(impl: str, name: str, stored: str | None, dtype: str) -> None:
    x, ids, weight, scales = given = make_product(CASES[name], stored, dtype=DTYPES[dtype])
    exact = reference(x.double(), ids, weight, scales)
    rounded = reference(x, ids, weight, scales)
    if scales is not None:  # as exact as what they are worth
        rounded = run([x, ids, dequantized(weight, scales, x.dtype), None], impl)
    assert_within_budget(run(given, impl), exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [None, "fp8", "int4_64_zeros", "nvfp4"])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_row_has_the_bits_that_it_has_alone(impl: str, stored: str | None, dtype: str) -> None:
    x, ids, *weights = given = make_product(CASES["odd_sizes"], stored, dtype=DTYPES[dtype])
    whole = run(given, impl)
    for rows in (slice(1), slice(1, 3), slice(4, None)):
        assert_same_bits(run([x[rows], ids[rows], *weights], impl), whole[rows])


def test_a_row_without_an_expert_is_zero(impl: str) -> None:
    x, ids, weight, _ = make_product(CASES["odd_sizes"])
    out = run(
        [x, torch.full_like(ids, len(weight)), torch.full_like(weight, torch.nan), None], impl
    )
    assert_same_bits(out, torch.zeros_like(out))


@pytest.mark.parametrize("stored", [None, "fp8", "nvfp4"])
def test_opcheck(impl: str, stored: str | None) -> None:
    *args, scales = make_product(CASES["odd_sizes"], stored)
    options = {"scales": scales, "impl": impl}
    tests = {"test_utils": FP8_OPCHECKS} if stored == "fp8" else {}
    torch.library.opcheck(torch.ops.torch_hybrid.expert_linear.default, args, options, **tests)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (1, torch.full((21,), 6, dtype=torch.int32), r"expert_ids must be in \[0, 5\], got 6"),
        (2, torch.zeros(5, 77, 44), r"weight must have shape \[5, 77, 45\], got \[5, 77, 44\]"),
        (3, torch.zeros(5, 1, 1), "weight must be 8-bit floats or integers to have scales"),
    ],
)
def test_refusals(impl: str, place: int, value: Tensor, told: str) -> None:
    given = make_product(CASES["odd_sizes"])
    given[place] = value
    with pytest.raises(ValueError, match=told):
        run(given, impl)
