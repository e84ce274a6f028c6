"""The contract of head_linear, held by every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.contract import impl_fixture, impls_on
from torch_hybrid.ops.core.capability import BATCH_INVARIANT
from torch_hybrid.ops.head_linear import head_linear, reference
from torch_hybrid.ops.head_linear.op import IMPLEMENTATIONS, HeadLinear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INVARIANT = impls_on("cpu", IMPLEMENTATIONS, frozenset({BATCH_INVARIANT}))
impl = impl_fixture(IMPLEMENTATIONS)


def inputs(num_tokens: int, *, is_transposed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads of a slice, and weights of sizes that fill no vector."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 3, 300, generator=generator)[:, :, 20:290]
    if is_transposed:
        weight = torch.randn(3, 270, 37, generator=generator).to(dtype).transpose(1, 2)
    else:
        weight = torch.randn(3, 37, 270, generator=generator).to(dtype)
    return x.to(dtype), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 130])
def test_matches_float64(impl: str, num_tokens: int, is_transposed: bool, dtype: str) -> None:
    x, weight = inputs(num_tokens, is_transposed=is_transposed, dtype=DTYPES[dtype])
    expected = reference.head_linear(HeadLinear(x.double(), weight.double(), impl=""))
    out = head_linear(x, weight, impl=impl)
    assert out.dtype == x.dtype
    rounding = torch.finfo(x.dtype).eps * 270**0.5
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=4 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_bias_are_rounded_once(impl: str, dtype: str) -> None:
    """Rounded before the bias too, a quarter of the numbers would be others."""
    x, weight = inputs(9, is_transposed=False, dtype=DTYPES[dtype])
    bias = 30 * torch.randn(3, 37, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    call = HeadLinear(x.double(), weight.double(), bias=bias.double(), impl="")
    exact = reference.head_linear(call)
    out = head_linear(x, weight, bias=bias, impl=impl)
    if dtype == "bf16":
        assert (out != exact.to(x.dtype)).float().mean() < 0.01
    else:
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("impl", INVARIANT, indirect=True)
def test_a_token_has_the_bits_that_it_has_alone(impl: str, is_transposed: bool, dtype: str) -> None:
    x, weight = inputs(70, is_transposed=is_transposed, dtype=DTYPES[dtype])
    assert_same_bits_in_any_batch(x, weight, impl)


def assert_same_bits_in_any_batch(x: Tensor, weight: Tensor, impl: str) -> None:
    for bias in (None, weight[..., 0].contiguous()):
        whole = head_linear(x, weight, bias=bias, impl=impl)
        for tokens in (slice(1), slice(1, 2), slice(5, 22), slice(63, 65), slice(69, None)):
            alone = head_linear(x[tokens], weight, bias=bias, impl=impl)
            assert torch.equal(alone, whole[tokens])


@pytest.mark.parametrize(
    ("x", "weight", "told"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 5, 4), "x must have 3 dimensions"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), r"weight must have shape \[3, 5, 4\]"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 5, 4).bfloat16(), "weight must have dtype"),
        (torch.zeros(2, 3, 8)[..., ::2], torch.zeros(3, 5, 4), "x must have contiguous heads"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 10, 8)[:, ::2, ::2], "contiguous rows or columns"),
    ],
)
def test_refusals(x: Tensor, weight: Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        head_linear(x, weight, impl="torch")
