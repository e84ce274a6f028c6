"""The contract of power_sum, held by every implementation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.devices import needs_cuda
from tests.errors import error_text
from tests.ops.contract import assert_within_budget, impl_fixture, impls_on, rows_apart
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    launches_on,
    needs_cross_compiler,
    orders_of_sums,
)
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.power_sum import power_sum, reference
from torch_hybrid.ops.power_sum.op import IMPLEMENTATIONS, PowerSum
from torch_hybrid.ops.triton.devices import interpreted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))
# Hidden states, heads, latents, experts; and what fills no block, or more than one.
SHAPES = {
    "hidden": (3, 2048),
    "heads": (1, 7, 4, 128),
    "latents": (5, 96),
    "experts": (9, 512),
    "one_element": (4, 1),
    "odd": (2, 3, 37),
    "two_blocks": (2, 5000),
    "one_row": (300,),
    "no_rows": (0, 64),
    "no_elements": (3, 0),
}
impl = impl_fixture(IMPLEMENTATIONS)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) + 0.25).to(dtype)


def assert_close(out: Tensor, x: Tensor, power: int) -> None:
    exact = reference.power_sum(PowerSum(x.double(), power, impl=""))
    assert out.dtype == torch.float32
    assert_within_budget(out, exact, reference.power_sum(PowerSum(x, power, impl="")))


def addend_of(x: Tensor) -> Tensor:
    """Another tensor like it, whose rows lie otherwise."""
    other = x.roll(1, -1) * 0.7
    return rows_apart(other) if x.dim() == 2 else other


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(impl: str, shape: str, dtype: str, power: int) -> None:
    x = rows_of(*SHAPES[shape], dtype=DTYPES[dtype])
    assert_close(power_sum(x, power, impl=impl), x, power)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_addend_is_added_as_torch_adds_it(impl: str, shape: str, dtype: str, power: int) -> None:
    """A sum has the bits that it has of what was added, rounded and stored before."""
    x = rows_of(*SHAPES[shape], dtype=DTYPES[dtype])
    other = addend_of(x)
    out, of_sums = power_sum(x, power, other, impl=impl), power_sum(x + other, power, impl=impl)
    if interpreted() and dtype == "bf16":  # there, bits are cut off
        torch.testing.assert_close(out, of_sums, rtol=0.02, atol=0.02 * x.shape[-1])
    else:
        assert torch.equal(out, of_sums)


def test_rows_that_lie_apart(impl: str) -> None:
    wide = rows_of(6, 4, 80)
    for x in (rows_apart(wide[0]), wide[:, 1:3, 8:48], wide[:, 1, 8:48], wide[0].t(), wide[:, 0]):
        assert_close(power_sum(x, 2, impl=impl), x, 2)


def test_what_is_not_finite_shows(impl: str) -> None:
    x = torch.ones(3, 40)
    x[0, 5], x[1, 39] = torch.nan, torch.inf
    out = power_sum(x, 1, impl=impl)
    assert out[0].isnan()
    assert out[1:].tolist() == [torch.inf, 40]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_columns", [24, 128, 600, 5000])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_row_has_the_bits_that_it_has_alone(impl: str, num_columns: int, dtype: str) -> None:
    assert_same_bits_anywhere(rows_of(37, num_columns, dtype=DTYPES[dtype]), impl)


def assert_same_bits_anywhere(x: Tensor, impl: str) -> None:
    """In any number of rows, and wherever they lie."""
    whole = power_sum(x, 2, impl=impl)
    for rows in (slice(1), slice(1, 2), slice(5, 22), slice(36, None)):
        assert torch.equal(power_sum(x[rows], 2, impl=impl), whole[rows])
    lying = torch.cat([x[:, :3], x, x[:, :2]], 1)[:, 3:-2]  # no row begins where vectors do
    assert torch.equal(power_sum(lying, 2, impl=impl), whole)
    assert torch.equal(power_sum(x.t().contiguous().t(), 2, impl=impl), whole)
    assert torch.equal(power_sum(x.unsqueeze(1).repeat(1, 3, 1), 2, impl=impl)[:, 1], whole)


test_in_the_interpreter = interprets("triton")


@needs_cuda
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape: str, dtype: str, power: int) -> None:
    x = rows_of(*SHAPES[shape], dtype=DTYPES[dtype])
    assert_close(power_sum(x.cuda(), power, impl="triton").cpu(), x, power)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_addend_on_a_gpu(shape: str, dtype: str) -> None:
    x = rows_of(*SHAPES[shape], dtype=DTYPES[dtype]).cuda()
    other = addend_of(x)
    added = power_sum(x + other, 2, impl="triton")
    assert torch.equal(power_sum(x, 2, other, impl="triton"), added)


@needs_cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_columns", [24, 128, 600, 2048, 5000])
def test_a_row_has_its_bits_alone_on_a_gpu(num_columns: int, dtype: str) -> None:
    assert_same_bits_anywhere(rows_of(37, num_columns, dtype=DTYPES[dtype]).cuda(), "triton")


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.power_sum import _triton

    rows = []
    for num_columns, target, is_added in product(
        (64, 128, 2048, 7168), SHARED_LIMITS, (False, True)
    ):
        x = torch.empty(64, num_columns, dtype=torch.bfloat16, device="meta")
        with launches_on(target) as launches:
            _triton.power_sum(PowerSum(x, 2, x if is_added else None, impl="triton"))
        label = f"squares of {num_columns}{', added up' * is_added}"
        rows.append(resources_of(launches["_power_sum_kernel"], target, label))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


@needs_cross_compiler
def test_sums_of_what_is_added_up_have_the_same_order() -> None:
    """A step that runs as it is adds up first, and sums after that."""
    from torch_hybrid.ops.power_sum import _triton

    for num_columns, dtype in product((24, 128, 600, 2048, 7168), (torch.bfloat16, torch.float32)):
        x = torch.empty(64, num_columns, dtype=dtype, device="meta")
        orders = []
        for addend in (None, x):
            with launches_on("sm_90") as launches:
                _triton.power_sum(PowerSum(x, 2, addend, impl="triton"))
            orders.append(orders_of_sums(launches["_power_sum_kernel"], "sm_90"))
        assert orders[0] == orders[1]


# ---- errors ----------------------------------------------------------------------------------


def test_error_texts() -> None:
    x = torch.zeros(4, 8)
    calls: list[tuple[Tensor, int, str]] = [
        (torch.tensor(1.0), 1, "torch"),
        (x, 3, "torch"),
        (x, 1, "tpu"),
    ]
    errors = [
        error_text(ValueError, power_sum, given, power, impl=impl) for given, power, impl in calls
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
x must have at least one dimension, got []
power must be 1 or 2, got 3
impl must be one of ['triton', 'torch'], got 'tpu'""",
    )
    with pytest.raises(ValueError, match=r"addend must have shape \[4, 8\], got \[8\]"):
        power_sum(x, 1, x[0], impl="torch")
    with pytest.raises(ValueError, match=r"got tensors of torch\.int32"):
        power_sum(x.int(), 1, impl="torch")
