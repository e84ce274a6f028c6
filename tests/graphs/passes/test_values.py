"""What is known of a graph's values after the passes is what they are when it runs; that of every
family is compared in test_schedule."""

from __future__ import annotations

import operator

import torch.nn.functional as F
from torch import Tensor

from tests.graphs.traced import arguments, check_values, in_halves, trace
from torch_hybrid.graphs.passes import DEFAULT_PASSES, apply_passes
from torch_hybrid.graphs.passes.values import value_of


def test_views_of_what_a_pass_replaced():
    """A view of a view is not a reader of the new node, and has its strides all the same."""

    def half(x: Tensor, a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        first, second = F.linear(x, a), F.linear(x, b)
        return first.unflatten(-1, (2, -1))[:, 1] + second[:, 4:]

    traced = trace(in_halves(half), *arguments())
    views = [n for n in traced.module.graph.nodes if n.target in ("unflatten", operator.getitem)]
    before = {node: value_of(node).stride() for node in views}
    apply_passes(traced.module, DEFAULT_PASSES)
    check_values(traced)
    assert any(value_of(node).stride() != before[node] for node in views)
