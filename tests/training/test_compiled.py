"""Forward, loss and backward are one graph, and no packing of as many tokens makes another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.training.twins import FAMILIES, flattened, furthest, grads, make_rows, make_twin

TOKENS = 128


def draw_lengths(seed: int) -> list[int]:
    """Draw lengths of TOKENS in all: 1 to TOKENS / 2 sequences, many of one token among these."""
    generator = torch.Generator().manual_seed(seed)
    most = [2, 8, 40, TOKENS][seed % 4]
    cuts = torch.randperm(TOKENS - 1, generator=generator)[: TOKENS // most - 1] + 1
    return torch.tensor([0, *cuts.sort().values, TOKENS]).diff().tolist()


def error(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Compute the largest error of a gradient, as a share of the largest gradient."""
    most = max(float(each.abs().max()) for each in those.values())
    return max(float((these[name] - that).abs().max()) for name, that in those.items()) / most


def compiled_steps(twin: Any, backend: str, num_steps: int) -> float:
    """Train on new packings, with two warm-ups; return how far gradients are from eager's."""
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(twin, fullgraph=True, backend=backend)
    worst = 0.0
    for seed in range(num_steps):
        sent = flattened(make_rows(draw_lengths(seed), seed))
        with torch.compiler.set_stance("default" if seed < 2 else "fail_on_recompile"):
            made = grads(twin, step(**sent).loss)
        worst = max(worst, furthest(made, grads(twin, twin(**sent).loss)))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_has_the_gradients_of_eager(family: str):
    assert compiled_steps(make_twin(family), "aot_eager", 3) < 1e-5
    assert counters["stats"]["unique_graphs"] <= 2


def test_twenty_packings_compile_nothing():
    assert compiled_steps(make_twin(), "aot_eager", 22) < 1e-5


def test_layers_compile_one_by_one_into_a_graph_of_each_kind():
    kinds = ["linear_attention", "full_attention"]
    twin = make_twin(num_hidden_layers=6, layer_types=kinds * 3)
    plain = copy.deepcopy(twin)
    torch._dynamo.reset()
    counters.clear()
    for layer in twin.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for seed in range(5):
        sent = flattened(make_rows(draw_lengths(seed), seed))
        with torch.compiler.set_stance("default" if seed < 2 else "fail_on_recompile"):
            made = grads(twin, twin(**sent).loss)
        assert furthest(made, grads(plain, plain(**sent).loss)) < 1e-5
    assert counters["stats"]["unique_graphs"] == len(kinds)


def test_router_logits_in_a_graph():
    twin = make_twin("qwen3_next", output_router_logits=True)
    sent = flattened(make_rows([20, 9]))
    torch._dynamo.reset()
    made = torch.compile(twin, fullgraph=True, backend="aot_eager")(**sent)
    torch.testing.assert_close(made.loss, twin(**sent).loss)
    assert made.aux_loss > 0


@pytest.mark.slow
def test_inductor_has_the_gradients_of_eager():
    assert compiled_steps(make_twin("qwen3_next"), "inductor", 4) < 1e-4


@pytest.mark.slow
def test_inductor_rounds_bfloat16_no_worse_than_eager_with_checkpointing():
    twin, sent = make_twin(), flattened(make_rows(draw_lengths(2)))
    exact = grads(twin, twin(**sent).loss)
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch._dynamo.reset()
    step = torch.compile(twin, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        eager, compiled = twin(**sent).loss, step(**sent).loss
    limit = 1.5 * error(grads(twin, eager), exact)
    assert error(grads(twin, compiled), exact) < limit
