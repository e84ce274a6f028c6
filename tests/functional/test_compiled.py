"""Functions to train with in one graph, forward and backward: no packing of one T recompiles."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.functional.recurrence import Recurrence, offsets
from tests.functional.recurrences import RECURRENCES
from tests.functional.rules import RULES, Rule
from tests.ops.contract import assert_same_bits
from torch_hybrid.functional import causal_conv1d

NUM_TOKENS = 192
# The convolution is in the delta rules' graph.
OTHERS = {n: of for n, of in RECURRENCES.items() if n not in (*RULES, "causal_conv1d")}


def packings(count: int) -> list[th.Packing]:
    """Make packings of one sequence, of all sequences of one token, and of any between."""
    draw = random.Random(0)
    found = [offsets((NUM_TOKENS,)), offsets((1,) * NUM_TOKENS)]
    while len(found) < count:
        cuts = draw.sample(range(NUM_TOKENS + 1), draw.randrange(1, 30))
        found.append(torch.tensor([0, *sorted(cuts), NUM_TOKENS]))
    return [th.Packing(each) for each in found]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_packing_recompiles(rule: Rule, backend: str) -> None:
    torch.manual_seed(0)

    def loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packing: th.Packing):
        weight = torch.ones(rule.num_v_heads * rule.v_dim, 4)
        o, _ = rule.function(q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False)
        y, _ = causal_conv1d(
            o.flatten(1), weight, None, packing, activation="silu", output_final_state=False
        )
        return y.square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for n, packing in enumerate(packings(20)):
        xs = [x.requires_grad_() for x in rule.inputs((NUM_TOKENS,))[:5]]
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            ours = torch.autograd.grad(compiled(*xs, packing), xs)
        plain = torch.autograd.grad(loss(*xs, packing), xs)
        for a, b in zip(ours, plain, strict=True):
            if backend == "aot_eager":
                assert_same_bits(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in OTHERS.items()])
def test_no_packing_recompiles_other_recurrences(of: Recurrence) -> None:
    """Steps and decays are in the graph too; a second T makes one more."""
    torch.manual_seed(0)

    def loss(*xs: Tensor) -> Tensor:
        return of.function(*xs, output_final_state=False)[0].square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    others = [th.Packing(offsets((n, 9))) for n in (55, 24, 119)]
    for n, packed in enumerate([*packings(8), *others]):
        xs = [x.requires_grad_() for x in of.inputs((packed.num_tokens,))[:-1]]
        with torch.compiler.set_stance("default" if n in (0, 8) else "fail_on_recompile"):
            made = torch.autograd.grad(compiled(*xs, packed), xs)
        for a, b in zip(made, torch.autograd.grad(loss(*xs, packed), xs), strict=True):
            assert_same_bits(a, b)


def test_other_numbers_of_tokens_share_a_graph() -> None:
    """After a second T, whose sizes become symbols."""
    rule = RULES["gated"]

    def loss(*xs: Tensor) -> Tensor:
        return rule.function(*xs, output_final_state=False)[0].square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n, num_tokens in enumerate((64, 96, 33, 128)):
        xs = [x.requires_grad_() for x in rule.inputs((num_tokens,))[:5]]
        with torch.compiler.set_stance("fail_on_recompile" if n > 1 else "default"):
            torch.autograd.grad(compiled(*xs), xs)


@pytest.mark.parametrize("name", ["gated", "ssd", "mlstm", "selective_scan"])
def test_sizes_may_be_symbols_from_the_first_graph_on(name: str) -> None:
    """What is computed before an op may come in any layout."""
    torch._dynamo.reset()
    of = RECURRENCES[name]
    xs = of.inputs((9,))[:-1]
    if of.op == "ssd":
        xs = [x.T.contiguous().T if x.ndim == 2 else x for x in xs]
    compiled = torch.compile(of.function, fullgraph=True, dynamic=True, backend="eager")
    assert_same_bits(compiled(*xs)[0], of.function(*xs)[0])
