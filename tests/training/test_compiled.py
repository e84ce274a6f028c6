"""Forward, loss and backward are one graph, and no packing of as many tokens makes another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.tiny_models import EACH_KIND
from tests.training.twins import FAMILIES, flattened, furthest, grads, make_rows, make_twin

TOKENS = 128
COUNTS = (64, 16, 3, 1, TOKENS, 2, 100, 31)  # of sequences


def draw_lengths(seed: int, tokens: int = TOKENS) -> list[int]:
    """Draw lengths of so many tokens in all: 1 to TOKENS sequences, many of one token."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(tokens - 1, generator=generator)[: COUNTS[seed % len(COUNTS)] - 1] + 1
    return torch.tensor([0, *cuts.sort().values, tokens]).diff().tolist()


def collated(seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Collate a packing as a trainer does, who divides the loss by a number of its own.

    Sequences of one token have no label; then that number keeps the loss from being 0 / 0.
    """
    sent = flattened(make_rows(draw_lengths(seed, tokens), seed))
    return {**sent, "num_items_in_batch": torch.tensor(tokens)}


def error(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Compute the largest error of a gradient, as a share of the largest gradient."""
    most = max(float(each.abs().max()) for each in those.values())
    return max(float((these[name] - that).abs().max()) for name, that in those.items()) / most


def compiled_steps(
    twin: Any, step: Any, plain: Any, sizes: list[int], *, marked: bool = False
) -> float:
    """Train on packings of so many tokens, with two warm-ups, or one where sizes are marked.

    Return how far gradients are from eager's.
    """
    worst = 0.0
    for seed, tokens in enumerate(sizes):
        sent = collated(seed, tokens)
        if marked and not seed:
            for tensor in (each for each in sent.values() if torch.is_tensor(each) and each.ndim):
                torch._dynamo.mark_dynamic(tensor, tensor.ndim - 1)
        with torch.compiler.set_stance("default" if seed < 2 - marked else "fail_on_recompile"):
            made = grads(twin, step(**sent).loss)
        worst = max(worst, furthest(made, grads(plain, plain(**sent).loss)))
    return worst


@pytest.fixture(autouse=True)
def new_counts() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "qwen3_next_dense"])
def test_one_graph_of_any_size_has_the_gradients_of_eager(family: str):
    """Dynamo traces every family, the default one below, and AOTAutograd each kind of mixer."""
    twin = make_twin(family)
    backend = "aot_eager" if family in EACH_KIND else "eager"
    step = torch.compile(twin, fullgraph=True, backend=backend)
    assert compiled_steps(twin, step, twin, [TOKENS, 160, 144], marked=True) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1


def test_twenty_packings_compile_nothing_and_other_sizes_one_graph():
    twin = make_twin()
    step = torch.compile(twin, fullgraph=True, backend="eager")
    assert compiled_steps(twin, step, twin, [TOKENS] * 22) < 1e-5
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2
    for tokens in (160, 144, 200):
        step(**collated(1, tokens)).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs + 1


def test_layers_compile_one_by_one_into_a_graph_of_each_kind():
    kinds = ["linear_attention", "full_attention"]
    twin = make_twin(num_hidden_layers=48, layer_types=kinds * 24)
    plain = copy.deepcopy(twin)
    for layer in twin.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert compiled_steps(twin, twin, plain, [TOKENS] * 3) < 1e-5
    assert counters["stats"]["unique_graphs"] == len(kinds)


@pytest.mark.parametrize("by_config", [True, False])
@pytest.mark.parametrize("asked", ["router_logits", "hidden_states"])
def test_what_layers_hand_out_in_a_graph(asked: str, by_config: bool):
    options = {f"output_{asked}": True}
    twin = make_twin("qwen3_next", **options if by_config else {})
    sent = flattened(make_rows([20, 9])) | ({} if by_config else options)
    backend = "aot_eager" if asked == "router_logits" and by_config else "eager"
    made, plain = torch.compile(twin, fullgraph=True, backend=backend)(**sent), twin(**sent)
    torch.testing.assert_close(made.loss, plain.loss)
    torch.testing.assert_close(made[asked], plain[asked])
    assert ("aux_loss" in made) == (asked == "router_logits")


@pytest.mark.slow
def test_inductor_has_the_gradients_of_eager():
    twin = make_twin("qwen3_next")
    step = torch.compile(twin, fullgraph=True)
    sent = collated(0)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):  # then the first graph is for any number
        torch._dynamo.mark_dynamic(sent[name], 0)
    step(**sent)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(4):
            sent = collated(seed)
            made = grads(twin, step(**sent).loss)
            assert furthest(made, grads(twin, twin(**sent).loss)) < 1e-4


@pytest.mark.slow
def test_inductor_rounds_bfloat16_no_worse_than_eager_with_checkpointing():
    """In one layer, which has a recurrence beside attention."""
    twin, sent = make_twin("falcon_h1", num_hidden_layers=1), collated(2)
    exact = grads(twin, twin(**sent).loss)
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step = torch.compile(twin, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        eager, compiled = twin(**sent).loss, step(**sent).loss
    limit = 1.5 * error(grads(twin, eager), exact)
    assert error(grads(twin, compiled), exact) < limit
