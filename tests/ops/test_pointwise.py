"""Functions of single numbers: the same bits wherever these lie, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.pointwise import sigmoid, silu, softplus

PAIRS = [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, lambda x: x.exp().log1p())]


@pytest.mark.parametrize(("ours", "exact"), PAIRS, ids=["sigmoid", "silu", "softplus"])
def test_a_number_has_the_bits_that_it_has_alone(
    ours: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]
) -> None:
    """Torch's own fail this: their last numbers are computed otherwise than the others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(1027, generator=generator) * 6, torch.linspace(-80, 80, 161)])
    assert torch.equal(torch.cat([ours(each) for each in x.split(1)]), ours(x))
    torch.testing.assert_close(ours(x).double(), exact(x.double()), rtol=3e-7, atol=0)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS[:2], ids=["sigmoid", "silu"])
def test_at_the_edges(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 200.0, -200.0])
    torch.testing.assert_close(ours(x), theirs(x), equal_nan=True)


def test_softplus_at_the_edges() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 200.0, -100.0])
    expected = torch.tensor([torch.inf, 0.0, torch.nan, 200.0, 3.78351e-44])
    torch.testing.assert_close(softplus(x), expected, rtol=0, atol=2e-45, equal_nan=True)
