"""The pass that gives routers' topk to an op, which a CPU stands in for here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.graphs.passes.test_passes import run
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.passes.own_functions import with_own_functions
from torch_hybrid.graphs.passes.own_top_k import OWN_TOP_K, own_top_k
from torch_hybrid.ops.core.capability import Capability
from torch_hybrid.ops.top_k import op

OWN = Pass("own_top_k", own_top_k)


@pytest.fixture
def native_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's implementation with its limits, computed by torch."""
    native, plain = op.IMPLEMENTATIONS["triton"], op.IMPLEMENTATIONS["torch"]
    limits = native.capability.limits
    capability = Capability(devices=frozenset({"cpu"}), limits=limits)
    stand_in = replace(plain, capability=capability)
    monkeypatch.setitem(op.IMPLEMENTATIONS, "triton", stand_in)


def softmax_router(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = torch.topk(logits.softmax(-1, dtype=torch.float), 4, dim=-1)
    return best / best.sum(-1, keepdim=True), ids


def group_router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the experts of the two best groups of four."""
    scores = logits.sigmoid()
    groups = scores.unflatten(-1, (4, -1))
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups[..., 0]).scatter(1, best, 1)
    eligible = groups.masked_fill(mask[..., None] == 0, -torch.inf).flatten(1)
    ids = torch.topk(eligible, k=3, dim=-1, sorted=False)[1]
    return scores.gather(1, ids), ids


@pytest.mark.usefixtures("native_on_a_cpu")
@pytest.mark.parametrize(("router", "num_calls"), [(softmax_router, 1), (group_router, 3)])
def test_values(router: Callable[[Tensor], tuple[Tensor, Tensor]], num_calls: int):
    logits = torch.randn(9, 32)
    (weights, ids), graph, _ = run(router, logits, passes=(OWN,))
    assert graph.count("top_k.default(") == num_calls
    assert "topk(" not in graph
    order, expected_order = ids.sort(), router(logits)[1].sort()
    assert torch.equal(order.values, expected_order.values)
    expected = router(logits)[0].gather(1, expected_order.indices)
    assert torch.equal(weights.gather(1, order.indices), expected)


@pytest.mark.usefixtures("native_on_a_cpu")
@pytest.mark.parametrize("router", [softmax_router, group_router])
def test_of_a_model_that_runs_as_it_is(router: Callable[[Tensor], tuple[Tensor, Tensor]]):
    """Of equal ones the first, whoever asks for how few."""
    logits = torch.randint(0, 3, (9, 32)).float()
    in_graph, _, _ = run(router, logits, passes=(OWN,))
    replaced = with_own_functions(router, OWN_TOP_K)
    assert all(map(torch.equal, replaced(logits), in_graph))
    best = with_own_functions(logits.topk, OWN_TOP_K)(3)
    assert torch.equal(best.values, logits.gather(-1, best.indices))
    least = with_own_functions(logits.topk, OWN_TOP_K)(3, largest=False)
    assert len(least.values) == 9


@pytest.mark.usefixtures("native_on_a_cpu")
def test_text():
    _, graph, _ = run(softmax_router, torch.randn(9, 32), passes=(OWN,))
    assert_expected_inline(
        graph,
        """\
softmax = softmax(l_logits_, -1)
topk = top_k.default(softmax, 4)
best = getitem(topk, 0)
ids = getitem(topk, 1)
sum_1 = sum(best, -1)
truediv = truediv(best, sum_1)""",
    )


@pytest.mark.usefixtures("native_on_a_cpu")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.topk(3, dim=0)[0],
        lambda x: x.topk(3, largest=False)[0],
        lambda x: x.topk(33)[0],
        lambda x: torch.cat([x] * 30, -1).topk(3)[0],
        lambda x: x.long().topk(3)[0],
    ],
    ids=["another dim", "the least", "too many", "too long", "integers"],
)
def test_what_the_op_cannot_do_stays(fn: Callable[[Tensor], Tensor]):
    x = torch.randn(9, 40)
    values, graph, _ = run(fn, x, passes=(OWN,))
    assert "topk(" in graph
    assert torch.equal(values, fn(x))


def test_nothing_changes_on_a_cpu():
    _, graph, _ = run(softmax_router, torch.randn(9, 32), passes=(OWN,))
    assert "topk(" in graph
