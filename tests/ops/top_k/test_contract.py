"""The contract of top_k, held by every implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.devices import needs_cuda
from tests.errors import error_text
from tests.ops.contract import impl_fixture
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import interprets
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.top_k import reference, top_k
from torch_hybrid.ops.top_k.op import IMPLEMENTATIONS, TopK

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (leading dims, elements in a row, k)
SHAPES = {
    "one_row": ((1,), 16, 3),
    "qwen3_next": ((7,), 512, 10),
    "groups": ((5, 8), 32, 2),
    "odd": ((3,), 37, 5),
    "all_of_them": ((2,), 8, 8),
    "most": ((2,), 1024, 32),
    "no_rows": ((0,), 16, 3),
}
MANY_ROWS = ((8192,), 60, 6)
impl = impl_fixture(IMPLEMENTATIONS)


def rows_with_everything(leading: tuple[int, ...], num_columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of few different numbers, with both zeros, both infinities and NaNs here and there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (*leading, num_columns), generator=generator) / 2
    kind = torch.randint(0, 40, x.shape, generator=generator)
    for i, special in enumerate((-0.0, torch.inf, -torch.inf, torch.nan)):
        x[kind == i] = special
    return x.to(dtype)


def assert_exact(x: Tensor, k: int, found: tuple[Tensor, Tensor]) -> None:
    """Places as the reference has them, and what stands there to the bit."""
    expected = reference.top_k(TopK(x, k, impl=""))
    assert found[1].dtype == torch.int64
    assert torch.equal(found[1], expected[1])
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    assert torch.equal(found[0].view(bits), expected[0].view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_places_and_elements(impl: str, shape: str, dtype: str) -> None:
    leading, num_columns, k = SHAPES[shape]
    x = rows_with_everything(leading, num_columns, DTYPES[dtype])
    assert_exact(x, k, top_k(x, k, impl=impl))


def test_equal_elements_stand_in_order(impl: str) -> None:
    assert top_k(torch.zeros(2, 9), 4, impl=impl)[1].tolist() == [[0, 1, 2, 3]] * 2


def test_rows_that_lie_apart(impl: str) -> None:
    wide = rows_with_everything((6, 4), 80, torch.float32)
    for x in (wide[:, :, :40], wide[:, 1, 8:48], wide[0].t()):
        assert_exact(x, 3, top_k(x, 3, impl=impl))


def test_agrees_with_torch(impl: str) -> None:
    x = torch.randn(50, 100)
    assert all(map(torch.equal, top_k(x, 7, impl=impl), x.topk(7)))


test_in_the_interpreter = interprets("triton")


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), MANY_ROWS])
def test_on_a_gpu(shape: tuple[tuple[int, ...], int, int], dtype: str) -> None:
    leading, num_columns, k = shape
    x = rows_with_everything(leading, num_columns, DTYPES[dtype])
    values, places = top_k(x.cuda(), k, impl="triton")
    assert_exact(x, k, (values.cpu(), places.cpu()))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.top_k import _triton

    rows = []
    for num_columns, k in ((512, 10), (256, 8), (32, 2), (1024, 32)):
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                x = torch.empty(64, num_columns, dtype=torch.float32, device="meta")
                _triton.top_k(TopK(x, k, impl="triton"))
            launch = launches["_top_k_kernel"]
            rows.append(resources_of(launch, target, f"{k} of {num_columns}"))
    assert_all_fit(rows, Path(__file__).with_name("resources.txt"))


# ---- errors ----------------------------------------------------------------------------------


def test_error_texts() -> None:
    x = torch.zeros(4, 8)
    calls: list[tuple[Tensor, int, str]] = [
        (x, 9, "torch"),
        (x, 0, "torch"),
        (torch.tensor(1.0), 1, "torch"),
        (x.int(), 2, "torch"),
        (x, 2, "tpu"),
    ]
    errors = [error_text(ValueError, top_k, given, k, impl=impl) for given, k, impl in calls]
    assert_expected_inline(
        "\n".join(errors),
        """\
x must have at least k = 9 elements in a row, got [4, 8]
x must have at least k = 0 elements in a row, got [4, 8]
x must have at least k = 1 elements in a row, got []
x must be a floating point tensor, got torch.int32
impl must be one of ['triton', 'torch'], got 'tpu'""",
    )
