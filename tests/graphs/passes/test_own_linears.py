"""Linear layers of uncompiled steps: which of them the op takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

from torch_hybrid.graphs.passes.own_linears import LARGE, OwnLinears, has_large_linears
from torch_hybrid.ops.native import compiler_missing

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


class WeightOfItsOwn(Tensor):
    """A tensor that computes its own products, like a quantized weight."""


def step_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, bool]:
    """Run a step of one linear layer, and say whether the op computed it."""
    layer = nn.Linear(1, 1, bias=bias is not None)
    layer.weight, layer.bias = (
        given if given is None else nn.Parameter(given, requires_grad=False)
        for given in (weight, bias)
    )
    with (
        torch.inference_mode(),
        profile() as profiled,
        OwnLinears.of([layer], "cpp").attached(layer),
    ):
        out = layer(x)
    assert "forward" not in vars(layer)
    return out, "torch_hybrid::linear" in {event.name for event in profiled.events() or ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading", [(3,), (2, 3), (0,)])
def test_rows_of_any_leading_shape(leading: tuple[int, ...], dtype: torch.dtype):
    x, weight = (torch.randint(-2, 3, size).to(dtype) for size in ((*leading, 32), (8, 32)))
    out, is_own = step_of(x, weight, torch.ones(8, dtype=dtype))
    assert is_own
    assert torch.equal(out, F.linear(x, weight) + 1)  # sums of few bits


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(32), torch.ones(8, 32)),
        (torch.ones(3, 32).double(), torch.ones(8, 32).double()),
        (torch.ones(3, 32), torch.ones(32, 8).T),
        (torch.ones(32, 3).T, torch.ones(8, 32)),
        (torch.ones(3, 32), torch.ones(8, 32).as_subclass(WeightOfItsOwn)),
    ],
    ids=["vector", "float64", "columns of a weight", "columns of x", "a tensor of its own"],
)
def test_what_stays_with_torch(x: Tensor, weight: Tensor):
    out, is_own = step_of(x, weight)
    assert not is_own
    assert torch.equal(out, torch.full((*x.shape[:-1], 8), 32, dtype=x.dtype))


def test_a_model_is_large_by_one_weight():
    small, large = nn.Linear(32, LARGE // 32 - 1), nn.Linear(32, LARGE // 32)
    assert has_large_linears([small, large])
    assert not has_large_linears([small, nn.ReLU()])
