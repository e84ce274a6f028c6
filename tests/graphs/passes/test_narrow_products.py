"""The pass that writes products of many small matrices out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.graphs.passes.test_passes import run
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.passes.narrow_products import narrow_products

NARROW = Pass("narrow_products", narrow_products)


def mixed(weights: Tensor, streams: Tensor) -> Tensor:
    """Residual streams as GLM-5.3 mixes them."""
    return torch.matmul(weights.transpose(-1, -2), streams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 7, 4, 3), (2, 7, 4, 20)), ((5, 8, 1), (5, 8, 6)), ((1, 4, 3), (9, 4, 6))],
)
def test_values(left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype):
    weights, streams = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    out, graph, _ = run(mixed, weights, streams, passes=(NARROW,))
    assert "matmul" not in graph
    torch.testing.assert_close(out, mixed(weights, streams))


def test_text():
    _, graph, _ = run(mixed, torch.randn(5, 2, 3), torch.randn(5, 2, 20), passes=(NARROW,))
    assert_expected_inline(
        graph,
        """\
transpose = transpose(l_weights_, -1, -2)
select = select(transpose, -1, 0)
unsqueeze = unsqueeze(select, -1)
select_1 = select(l_streams_, -2, 0)
unsqueeze_1 = unsqueeze(select_1, -2)
mul = mul(unsqueeze, unsqueeze_1)
select_2 = select(transpose, -1, 1)
unsqueeze_2 = unsqueeze(select_2, -1)
select_3 = select(l_streams_, -2, 1)
unsqueeze_3 = unsqueeze(select_3, -2)
mul_1 = mul(unsqueeze_2, unsqueeze_3)
add = add(mul, mul_1)""",
    )


def test_other_devices_keep_them():
    for_gpus = Pass("narrow_products", partial(narrow_products, devices=("cuda",)))
    _, graph, _ = run(mixed, torch.randn(5, 2, 3), torch.randn(5, 2, 20), passes=(for_gpus,))
    assert graph.count("matmul(") == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 9, 4), (5, 4, 20)), ((5, 4, 1), (5, 1, 20)), ((4, 4), (4, 20)), ((5, 4, 4), (4,))],
)
def test_others_stay(left: tuple[int, ...], right: tuple[int, ...]):
    """Of many rows, of one term, and of single matrices."""
    x, y = torch.randn(left), torch.randn(right)
    out, graph, _ = run(lambda x, y: torch.matmul(x, y), x, y, passes=(NARROW,))
    assert graph.count("matmul(") == 1
    assert torch.equal(out, torch.matmul(x, y))
