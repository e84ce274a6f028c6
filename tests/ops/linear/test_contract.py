"""The contract of linear, held by every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.block_scales import FP8_OPCHECKS
from tests.ops.contract import (
    assert_draws_within_budget,
    assert_within_budget,
    impl_fixture,
    impls_on,
    skip_reason,
)
from tests.ops.integers import FORMATS, not_finite
from tests.ops.linear.cases import (
    CASES,
    Case,
    Inputs,
    draws_of_integers,
    make_fp8_inputs,
    make_inputs,
    make_integer_inputs,
    make_mixed_inputs,
    make_stored_inputs,
)
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, NO_FEATURES
from torch_hybrid.ops.formats.block_scales import rounded
from torch_hybrid.ops.formats.integers import MXFP4, NVFP4
from torch_hybrid.ops.formats.stored_weights import features_of
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.linear.op import FEATURES, IMPLEMENTATIONS, MIXED
from torch_hybrid.ops.linear.reference import linear_reference

ALL_OPCHECKS = ("test_schema", *FP8_OPCHECKS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = Case(num_rows=6, depth=50, widths=(7, 20), biased=frozenset({1}))
ROWS = Case(num_rows=75, depth=330, widths=(70, 9), biased=frozenset({1}))
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))


impl = impl_fixture(IMPLEMENTATIONS, NO_FEATURES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_exact_result(impl: str, name: str, dtype: str) -> None:
    assert_as_exact(impl, make_inputs(CASES[name], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("num_rows", range(1, 20))
def test_every_small_number_of_rows(impl: str, num_rows: int) -> None:
    case = Case(num_rows=num_rows, depth=600, widths=(21,), biased=frozenset({0}))
    assert_as_exact(impl, make_inputs(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 9, 64])
def test_a_row_does_not_see_the_others(impl: str, num_rows: int, dtype: str) -> None:
    case = Case(num_rows=num_rows, depth=530, widths=(70,))
    assert_last_row_sees_no_other(impl, make_inputs(case, dtype=DTYPES[dtype]))


def assert_last_row_sees_no_other(impl: str, inputs: Inputs) -> None:
    expected = inputs.run(impl)
    for others in (torch.nan, torch.inf, 1e30):
        inputs.x[:-1] = others
        assert torch.equal(inputs.run(impl)[-1], expected[-1])


def assert_same_bits_in_any_batch(impl: str, inputs: Inputs) -> None:
    whole = inputs.run(impl)
    for rows in (slice(1), slice(3), slice(17), slice(5, 69), slice(69, None)):
        assert torch.equal(replace(inputs, x=inputs.x[rows]).run(impl), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_row_has_the_same_bits_in_any_batch(impl: str, dtype: str) -> None:
    assert_same_bits_in_any_batch(impl, make_inputs(ROWS, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["fp8", *FORMATS])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_row_beside_scales_has_the_same_bits_in_any_batch(
    impl: str, stored: str, dtype: str
) -> None:
    assert_same_bits_in_any_batch(impl, make_stored_inputs(ROWS, stored, dtype=DTYPES[dtype]))


def test_merged_equals_one_by_one(impl: str) -> None:
    inputs = make_inputs(CASES["decode_in_proj"])
    merged = inputs.run(impl)
    pairs = zip(inputs.weights, inputs.biases, strict=True)
    single = [replace(inputs, weights=[w], biases=[b]).run(impl) for w, b in pairs]
    torch.testing.assert_close(merged, torch.cat(single, dim=1), rtol=1e-5, atol=1e-6)


def test_infinity_and_nan_in_a_weight_stay_in_their_column(impl: str) -> None:
    inputs = make_inputs(SMALL)
    expected = inputs.run(impl)
    inputs.weights[0][2, 7], inputs.weights[1][5, 9] = torch.nan, torch.inf
    out = inputs.run(impl)
    assert out[:, 2].isnan().all()
    assert out[:, 12].isinf().all()
    clean = [i for i in range(27) if i not in (2, 12)]
    assert torch.equal(out[:, clean], expected[:, clean])


# ---- weights of 8 bits -----------------------------------------------------------------------


fp8_impl = impl_fixture(IMPLEMENTATIONS, FEATURES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_fp8_matches_the_exact_result(fp8_impl: str, name: str, dtype: str) -> None:
    assert_as_exact(fp8_impl, make_fp8_inputs(CASES[name], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("num_rows", range(1, 20))
def test_fp8_of_every_small_number_of_rows(fp8_impl: str, num_rows: int) -> None:
    case = Case(num_rows=num_rows, depth=600, widths=(21,), biased=frozenset({0}))
    assert_as_exact(fp8_impl, make_fp8_inputs(case))


@pytest.mark.parametrize("impl", impls_on("cpu", IMPLEMENTATIONS, FEATURES | {MIXED}))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["decode_in_proj", "thirteen_rows", "five_rows_odd", "prefill"])
def test_weights_beside_those_with_scales(impl: str, name: str, dtype: str) -> None:
    if reason := skip_reason(IMPLEMENTATIONS[impl], "cpu"):
        pytest.skip(reason)
    assert_as_exact(impl, make_mixed_inputs(CASES[name], dtype=DTYPES[dtype]))


def assert_as_exact(impl: str, inputs: Inputs) -> None:
    assert_within_budget(inputs.run(impl), *expected_of(inputs, impl))


def expected_of(inputs: Inputs, impl: str = "torch") -> tuple[Tensor, Tensor]:
    """Compute the result exactly, and by the reference, for an implementation."""
    inputs = replace(inputs, impl=impl)
    return linear_reference(inputs.exact()), linear_reference(inputs)


def test_what_is_left_of_x_in_8_bits() -> None:
    """The largest number of 128 becomes 448, and the others keep four significant bits."""
    x = torch.randn(3, 300) * torch.logspace(-3, 3, 300)
    x[1, :128] = 0
    left = rounded(x)
    for first in (0, 128, 256):
        columns = slice(first, first + 128)
        largest = x[:, columns].abs().amax(1, keepdim=True)
        torch.testing.assert_close(left[:, columns].abs().amax(1, keepdim=True), largest)
        error = (left[:, columns] - x[:, columns]).abs()
        assert (error <= x[:, columns].abs() / 16 + largest / 448 / 2**9).all()
    assert (rounded(left) - left).abs().max() <= 1e-6 * left.abs().max()


def test_every_number_of_8_bits(fp8_impl: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for num_rows in (1, 20):
        x = torch.ones(num_rows, 1)
        out = linear(x, [numbers[:, None]], [None], scales=[torch.ones(2, 1)], impl=fp8_impl)
        expected = numbers.float().expand(num_rows, -1)
        # Rounded, 1 is 448 times a unit, which is none of float32.
        rtol = 2**-23 if fp8_impl == "triton_fp8" else 0
        torch.testing.assert_close(out, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 9, 64])
def test_a_row_of_fp8_does_not_see_the_others(fp8_impl: str, num_rows: int, dtype: str) -> None:
    case = Case(num_rows=num_rows, depth=530, widths=(70,))
    assert_last_row_sees_no_other(fp8_impl, make_fp8_inputs(case, dtype=DTYPES[dtype]))


def test_a_scale_is_that_of_its_block(fp8_impl: str) -> None:
    inputs = make_fp8_inputs(Case(num_rows=6, depth=300, widths=(140, 130)))
    assert inputs.scales is not None
    expected = inputs.run(fp8_impl)
    inputs.scales[0][1, 2], inputs.scales[1][0, 0] = torch.nan, torch.inf
    out = inputs.run(fp8_impl)
    assert out[:, 128:140].isnan().all()
    assert not out[:, 140:268].isfinite().any()
    clean = [*range(128), 268, 269]
    assert torch.equal(out[:, clean], expected[:, clean])


# ---- weights that are integers ---------------------------------------------------------------


def check_takes(impl: str, weight: Tensor) -> None:
    if reasons := IMPLEMENTATIONS[impl].capability.features_refused(features_of(weight.dtype)):
        pytest.skip("; ".join(reasons))


Draws = list[tuple[Inputs, tuple[Tensor, Tensor]]]


@pytest.fixture(scope="module", params=product(CASES, FORMATS, DTYPES), ids="-".join)
def expected_draws(request: pytest.FixtureRequest) -> Draws:
    """Inputs and what the reference makes of them, once for all implementations."""
    name, stored, dtype = request.param
    return [(i, expected_of(i)) for i in draws_of_integers(name, stored, dtype=DTYPES[dtype])]


def test_integers_match_the_exact_result(impl: str, expected_draws: Draws) -> None:
    check_takes(impl, expected_draws[0][0].weights[0])
    assert_draws_within_budget([(i.run(impl), *expected) for i, expected in expected_draws])


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("num_rows", range(1, 20))
def test_integers_meet_every_small_number_of_rows(impl: str, num_rows: int, stored: str) -> None:
    case = Case(num_rows=num_rows, depth=600, widths=(21,), biased=frozenset({0}))
    inputs = make_integer_inputs(case, stored)
    check_takes(impl, inputs.weights[0])
    assert_as_exact(impl, inputs)


@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_every_number_of_8_and_of_4_bits(impl: str, num_rows: int) -> None:
    """A one in each column of x in turn picks the numbers of that column."""
    numbers = torch.arange(-128, 128, dtype=torch.int8)
    check_takes(impl, numbers)
    x = torch.ones(num_rows, 1)
    out = linear(x, [numbers[:, None]], [None], scales=[torch.full((256,), 0.5)], impl=impl)
    assert torch.equal(out, numbers.float().expand(num_rows, -1) / 2)

    pairs = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    for column in (0, 1, 30, 31):
        x = torch.zeros(num_rows, 32)
        x[:, column] = 1
        out = linear(x, [pairs], [None], scales=[torch.full((256, 1), 0.5)], impl=impl)
        half = pairs[:, 0] >> 4 if column % 2 else pairs[:, 0] & 15
        assert torch.equal(out, (half.float() - 8).expand(num_rows, -1) / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 3, 9, 64])
def test_a_row_beside_integers_does_not_see_the_others(
    impl: str, num_rows: int, stored: str, dtype: str
) -> None:
    case = Case(num_rows=num_rows, depth=530, widths=(70,))
    inputs = make_integer_inputs(case, stored, dtype=DTYPES[dtype])
    check_takes(impl, inputs.weights[0])
    assert_last_row_sees_no_other(impl, inputs)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("num_rows", [2, 7, 30])
def test_a_scale_is_that_of_its_row_or_group(impl: str, num_rows: int, stored: str) -> None:
    case = Case(num_rows=num_rows, depth=384, widths=(37, 50))
    inputs = make_integer_inputs(case, stored)
    check_takes(impl, inputs.weights[0])
    assert inputs.scales is not None
    expected = inputs.run(impl)
    first, second = inputs.scales
    first[5], second[49] = not_finite(first, torch.nan), not_finite(second, torch.inf)
    out = inputs.run(impl)
    assert out[:, 5].isnan().all()
    assert not out[:, 86].isfinite().any()
    clean = [i for i in range(87) if i not in (5, 86)]
    assert torch.equal(out[:, clean], expected[:, clean])


@pytest.mark.parametrize("num_rows", [1, 6, 40])
@pytest.mark.parametrize("block", [MXFP4, NVFP4])
def test_every_number_and_scale_of_fp4(impl: str, block: int, num_rows: int) -> None:
    """A one in a column of x picks its number, of blocks with all scales that are finite."""
    words = torch.tensor([0x76543210, -0x1234568], dtype=torch.int32)  # each number
    weight = words.repeat(256, 4)
    check_takes(impl, weight)
    stored = torch.arange(256, dtype=torch.uint8)[:, None]
    if block == NVFP4:
        factor = torch.tensor([0.75]).view(torch.uint8).expand(256, -1)
        scales = torch.cat([stored, stored.flip(0), stored, stored, factor], 1)
        worth = scales[:, :4].contiguous().view(torch.float8_e4m3fn).float() * 0.75
    else:
        scales = torch.cat([stored, stored.flip(0)], 1)
        worth = scales.view(torch.float8_e8m0fnu).float()
    sizes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    numbers = torch.tensor([s * v for s in (1, -1) for v in sizes] * 4)
    keeps = (worth.abs() < 2.0**120).all(1)  # none is infinite, nor NaN
    for column in range(64):
        x = torch.zeros(num_rows, 64)
        x[:, column] = 1
        out = linear(x, [weight[keeps]], [None], scales=[scales[keeps]], impl=impl)
        expected = numbers[column] * worth[keeps, column // block]
        assert torch.equal(out, expected.expand(num_rows, -1))


# ---- the op as the compiler sees it ----------------------------------------------------------


def opcheck(impl: str, inputs: Inputs, utils: Sequence[str] = ALL_OPCHECKS) -> None:
    x = inputs.x.contiguous()  # opcheck compares the whole storage, NaN margins included
    args, options = replace(inputs, x=x).args(), {**inputs.options(), "impl": impl}
    op = torch.ops.torch_hybrid.linear.default
    torch.library.opcheck(op, args, options, test_utils=utils)


@pytest.mark.parametrize("name", ["five_rows_odd", "prefill"])
def test_opcheck_of_fp8(fp8_impl: str, name: str) -> None:
    opcheck(fp8_impl, make_fp8_inputs(CASES[name]), FP8_OPCHECKS)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", ["five_rows_odd", "prefill"])
def test_opcheck_of_integers(impl: str, name: str, stored: str) -> None:
    inputs = make_integer_inputs(CASES[name], stored)
    check_takes(impl, inputs.weights[0])
    opcheck(impl, inputs)


# ---- errors ----------------------------------------------------------------------------------


def test_what_is_traced_without_scales_does_not_name_them() -> None:
    inputs = make_inputs(SMALL)
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: linear(x, inputs.weights, inputs.biases, impl="torch")
    )(inputs.x)
    assert "scales" not in str(traced.graph)


def failing(impl: str = "torch", /, **changes: object) -> str:
    arguments = {**given(make_inputs(SMALL)), **changes}
    return error_text(ValueError, linear, **arguments, impl=impl)


def given(inputs: Inputs) -> dict[str, Any]:
    return dict(zip(("x", "weights", "biases"), inputs.args(), strict=True)) | inputs.options()


def fp8_errors() -> list[str]:
    fp8 = given(make_fp8_inputs(Case(num_rows=6, depth=300, widths=(7, 200))))
    weights, scales = fp8["weights"], fp8["scales"]
    return [
        failing(**fp8 | {"weights": [weight.float() for weight in weights]}),
        failing(**fp8 | {"scales": None}),
        failing(**fp8 | {"scales": scales[:1]}),
        failing(**fp8 | {"scales": [scales[0], scales[1].mT]}),
        failing(**fp8 | {"scales": [scales[0].bfloat16(), scales[1]]}),
        failing(**fp8 | {"scales": [scales[0], torch.ones(2, 6)[:, ::2]]}),
    ]


def integer_errors() -> list[str]:
    case = Case(num_rows=6, depth=384, widths=(7, 20))
    int8 = given(make_integer_inputs(case, "int8"))
    int4 = given(make_integer_inputs(case, "int4_of_128"))
    weights, scales = int4["weights"], int4["scales"]
    return [
        failing(**int8 | {"scales": None}),
        failing(**int8 | {"weights": [int8["weights"][0], weights[1]]}),
        failing(**int8 | {"weights": [int8["weights"][0], int8["weights"][1][:, :50]]}),
        failing(**int8 | {"scales": [int8["scales"][0], torch.ones(20, 1)]}),
        failing(**int4 | {"weights": [weights[0], weights[1][:, :50]]}),
        failing(**int4 | {"scales": [scales[0], torch.ones(20, 4)]}),
        failing(**int4 | {"scales": [scales[0].half(), scales[1]]}),
        failing(
            x=torch.randn(2, 50),
            weights=[torch.zeros(3, 25, dtype=torch.uint8)],
            biases=[None],
            scales=[torch.ones(3, 2)],
        ),
        *fp4_errors(case),
    ]


def fp4_errors(case: Case) -> list[str]:
    mxfp4, nvfp4 = (given(make_integer_inputs(case, name)) for name in ("mxfp4", "nvfp4"))
    scales = nvfp4["scales"]
    return [
        failing(**mxfp4 | {"scales": [scales[0], scales[1][:, :24]]}),
        failing(**mxfp4 | {"scales": [scales[0], mxfp4["scales"][1].float()]}),
        failing(**mxfp4 | {"scales": [scales[0], mxfp4["scales"][1]]}),
        failing(**mxfp4 | {"x": torch.randn(2, 385)}),
        failing(
            x=torch.randn(2, 48),
            weights=[torch.zeros(3, 6, dtype=torch.int32)],
            biases=[None],
            scales=[torch.ones(3, 7, dtype=torch.uint8)],
        ),
    ]


def test_is_deterministic(impl: str) -> None:
    inputs = make_inputs(CASES["decode_in_proj"])
    first = inputs.run(impl)
    assert all(torch.equal(inputs.run(impl), first) for _ in range(5))


def test_error_texts() -> None:
    weight = torch.randn(7, 50)
    errors = [
        failing(weights=[], biases=[]),
        failing(biases=[None]),
        failing(weights=[weight, torch.randn(20, 49)]),
        failing(weights=[weight, torch.randn(20, 50).bfloat16()]),
        failing(weights=[torch.randn(50, 7).T, torch.randn(20, 50)]),
        failing(biases=[torch.randn(8), None]),
        *fp8_errors(),
        *integer_errors(),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
weights must have at least one tensor, got none
biases must have length 2, got 1
weights[1] must have shape [20, 50], got [20, 49]
weights[1] must have dtype torch.float32, got torch.bfloat16
weights[0] must be contiguous, got strides [1, 7]
biases[0] must have shape [7], got [8]
weights[0] must be 8-bit floats or integers to have scales, got torch.float32
weights[0] must have dtype torch.float32, got torch.float8_e4m3fn
weights[1] must have dtype torch.float32, got torch.float8_e4m3fn
scales[1] must have shape [2, 3], got [3, 2]
scales[0] must have dtype torch.float32, got torch.bfloat16
scales[1] must be contiguous, got strides [6, 2]
weights[0] must have dtype torch.float32, got torch.int8
weights[1] must have shape [20, 384], got [20, 192]
weights[1] must have shape [20, 384], got [20, 50]
scales[1] must have shape [20], got [20, 1]
weights[1] must have shape [20, 192], got [20, 50]
scales[1] must have shape [20, 12] or [20, 6] or [20, 3], or 2 of each with zero points, got [20, 4]
scales[0] must have dtype torch.float32, got torch.float16
scales[0]: a row of 50 numbers of 4 bits has no whole groups of 32, 64 or 128
scales[1] must have shape [20, 12] of MXFP4 or [20, 28] of NVFP4, got [20, 24]
scales[1] must have dtype torch.uint8, got torch.float32
scales must be of MXFP4 or of NVFP4, got both
weights[0] must have shape [7, 49], got [7, 48]
scales[0]: a row of FP4 must have a multiple of 32 numbers, got 48""",
    )
