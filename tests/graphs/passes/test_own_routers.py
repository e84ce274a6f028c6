"""The pass that gives whole routers to an op, which a CPU stands in for here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.graphs.passes.test_passes import run
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.passes.own_routers import own_routers
from torch_hybrid.ops.core.capability import Capability
from torch_hybrid.ops.route import op

OWN = Pass("own_routers", own_routers)
DIM, NUM_EXPERTS = 16, 32
CONFIG = SimpleNamespace(
    hidden_size=DIM,
    num_experts=NUM_EXPERTS,
    num_local_experts=NUM_EXPERTS,
    n_routed_experts=NUM_EXPERTS,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    use_expert_bias=True,
)
# Classes of transformers, by module; and whether the op takes them. Granite's softmax is of the
# logits of the chosen.
ROUTERS = {
    "qwen3_next": ("Qwen3NextTopKRouter", True),
    "qwen3_5_moe": ("Qwen3_5MoeTopKRouter", True),
    "minimax": ("MiniMaxTopKRouter", True),
    "bailing_hybrid": ("BailingHybridTopkRouter", True),
    "kimi_linear": ("KimiLinearTopkRouter", True),
    "deepseek_v3": ("DeepseekV3TopkRouter", True),
    "nemotron_h": ("NemotronHTopkRouter", True),
    "lfm2_moe": ("Lfm2MoeTopKRouter", True),
    "granitemoehybrid": ("GraniteMoeHybridTopKRouter", False),
}


@pytest.fixture
def native_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's implementation with its limits, computed by torch."""
    native, plain = op.IMPLEMENTATIONS["triton"], op.IMPLEMENTATIONS["torch"]
    capability = Capability(devices=frozenset({"cpu"}), limits=native.capability.limits)
    monkeypatch.setitem(op.IMPLEMENTATIONS, "triton", replace(plain, capability=capability))


class WithBias(nn.Module):
    """A router whose layer has the bias."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.expert_bias = router, nn.Buffer(torch.empty(NUM_EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.router(x, self.expert_bias)
        return outputs


def make_router(family: str, **changes: Any) -> nn.Module:
    config = SimpleNamespace(**{**vars(CONFIG), **changes})
    module = getattr(
        getattr(pytest.importorskip("transformers").models, family), f"modeling_{family}"
    )
    router: nn.Module = getattr(module, ROUTERS[family][0])(config)
    if family == "lfm2_moe":
        router = WithBias(router)
    generator = torch.Generator().manual_seed(0)
    for weight in (*router.parameters(), *router.buffers()):
        weight.data.normal_(generator=generator)
    return router.requires_grad_(False)


def routed(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Weights and ids in the order of ids, which not all routers sort alike."""
    weights = next(x for x in reversed(outputs) if x.is_floating_point())
    ids, order = next(x for x in outputs if x.dtype == torch.int64).sort()
    return weights.gather(1, order), ids


@pytest.mark.usefixtures("native_on_a_cpu")
def test_routers_of_models() -> None:
    """All in one graph: to trace each by itself takes longer."""
    routers = nn.ModuleList(map(make_router, ROUTERS))

    def route_all(x: Tensor) -> list[tuple[Tensor, ...]]:
        return [router(x) for router in routers]

    x = torch.randn(9, DIM)
    outputs, graph, _ = run(route_all, x, passes=(OWN,))
    num_others = sum(not is_taken for _, is_taken in ROUTERS.values())
    assert graph.count("route.default(") == len(routers) - num_others
    assert graph.count("topk(") == num_others
    for found, router in zip(outputs, routers, strict=True):
        weights, ids = routed(found)
        expected, expected_ids = routed(router(x))
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("native_on_a_cpu")
def test_text() -> None:
    families = ("qwen3_next", "bailing_hybrid")
    graphs = [run(make_router(f), torch.randn(9, DIM), passes=(OWN,))[1] for f in families]
    assert_expected_inline(
        "\n\n".join(graphs),
        """\
hidden_states = reshape(l_hidden_states_, -1, 16)
router_logits = linear(hidden_states, l_selfweight_)
route_default = route.default(router_logits, None, 4)
getitem_2 = getitem(route_default, 0)
getitem_3 = getitem(route_default, 1)

hidden_states = view(l_hidden_states_, -1, 16)
type_1 = type(hidden_states, torch.float32)
type_2 = type(l_selfweight_, torch.float32)
router_logits = linear(type_1, type_2)
route_default = route.default(router_logits, l_self_buffers_e_score_correction_bias_, 4)
getitem_6 = getitem(route_default, 0)
getitem_7 = getitem(route_default, 1)""",
    )


def _by_two(x: Tensor, y: Tensor) -> list[Tensor]:
    """As halves of a step are interleaved."""
    scores, others = x.softmax(-1), y.softmax(-1)
    chosen, also = scores.topk(4), others.topk(4)
    best, ids = chosen[0], also[1]
    total = best.sum(-1, keepdim=True)
    return [chosen[1], ids, also[0] / also[0].sum(-1, keepdim=True), best / total]


@pytest.mark.usefixtures("native_on_a_cpu")
def test_two_at_once() -> None:
    x, y = torch.randn(2, 9, 40)
    outputs, graph, _ = run(_by_two, x, y, passes=(OWN,))
    assert graph.count("route.default(") == 2
    for found, expected in zip(outputs, _by_two(x, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def _uses_scores_too(x: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.softmax(-1)
    best, ids = scores.topk(4)
    return best + scores.sum(), ids


def _changed_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = x.softmax(-1).topk(4)
    kept = best * 1
    best /= best.sum(-1, keepdim=True)
    return best + kept, ids


@pytest.mark.usefixtures("native_on_a_cpu")
@pytest.mark.parametrize(
    "fn",
    [
        _uses_scores_too,
        lambda x: x.softmax(0).topk(4),
        lambda x: x.bfloat16().softmax(-1).topk(4),
        lambda x: x.softmax(-1).topk(33),
        lambda x: x.softmax(-1).topk(4, largest=False),
        lambda x: x.softmax(-1).topk(4, dim=0),
        lambda x: (x.sigmoid() * 2).topk(4),
        lambda x: torch.cat([x] * 30, -1).softmax(-1).topk(4),
        lambda x: x.softmax(-1).relu(),
        lambda x: x.sigmoid(),
    ],
)
def test_what_the_op_cannot_do_stays(fn: Callable[[Tensor], Any]) -> None:
    x = torch.randn(40, 40)
    outputs, graph, _ = run(fn, x, passes=(OWN,))
    assert "route" not in graph
    expected = fn(x)
    for found, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("native_on_a_cpu")
@pytest.mark.parametrize(
    "fn",
    [
        _changed_in_place,
        lambda x: x.softmax(-1).topk(4),
        lambda x: tuple(y * 2 for y in x.sigmoid().topk(4)),
        lambda x: [(b / (b.sum() + 1), i) for b, i in [x.softmax(-1).topk(4)]][0],  # noqa: RUF015
        lambda x: [(b / b.sum(-1, keepdim=True) + b, i) for b, i in [x.softmax(-1).topk(4)]][0],  # noqa: RUF015
    ],
)
def test_weights_used_in_other_ways(fn: Callable[[Tensor], Any]) -> None:
    """The choice is the op's, and what follows stays where it is no division by the sum."""
    x = torch.randn(9, 40)
    (weights, ids), graph, _ = run(fn, x, passes=(OWN,))
    assert graph.count("route.default(") == 1
    expected = fn(x)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=0)


def test_nothing_changes_on_a_cpu() -> None:
    _, graph, _ = run(make_router("qwen3_next"), torch.randn(9, DIM), passes=(OWN,))
    assert "topk(" in graph
