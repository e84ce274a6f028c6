"""Training on a GPU: the gradients of a CPU, without reading a tensor on the host, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import cast
from tests.training.test_compiled import draw_lengths, error
from tests.training.twins import FAMILIES, flattened, furthest, grads, make_rows, make_twin

pytestmark = pytest.mark.cuda
LENGTHS = [70, 1, 3, 200, 33]


def on_cuda(sent: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in sent.items()}


def on_cpu(these: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy gradients, which move where their parameters do."""
    return {name: each.float().cpu().clone() for name, each in these.items()}


@pytest.mark.parametrize(
    ("family", "lengths"),
    [*((family, LENGTHS) for family in FAMILIES), ("qwen3_next_dense", [9, 30])],
)
def test_gradients_in_float32_are_those_of_a_cpu(family: str, lengths: list[int]):
    """Of few tokens too, for which Inductor would take another kernel."""
    twin, sent = make_twin(family), flattened(make_rows(lengths))
    expected = on_cpu(grads(twin, twin(**sent).loss))
    twin.cuda()
    made = on_cpu(grads(twin, twin(**on_cuda(sent)).loss))
    assert furthest(made, expected) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_has_the_same_bits_twice(family: str):
    twin = cast(make_twin(family).cuda(), torch.bfloat16)
    sent = on_cuda(flattened(make_rows(LENGTHS)))
    first, second = (on_cpu(grads(twin, twin(**sent).loss)) for _ in range(2))
    assert all(each.isfinite().all() for each in first.values())
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_nothing_is_read_on_the_host():
    twin, sent = make_twin().to("cuda", torch.bfloat16), on_cuda(flattened(make_rows(LENGTHS)))
    twin(**sent).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        twin(**sent).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_by_inductor(checkpointing: bool):
    twin = make_twin()
    sent = flattened(make_rows(draw_lengths(2)))
    exact = on_cpu(grads(twin, twin(**sent).loss))
    twin = twin.to("cuda", torch.bfloat16)
    if checkpointing:
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch._dynamo.reset()
    step = torch.compile(twin, fullgraph=True)
    for seed in range(6):
        given = on_cuda(flattened(make_rows(draw_lengths(seed), seed)))
        with torch.compiler.set_stance("default" if seed < 2 else "fail_on_recompile"):
            made = on_cpu(grads(twin, step(**given).loss))
        eager = on_cpu(grads(twin, twin(**given).loss))
        if seed == 2:
            assert error(made, exact) < 1.5 * error(eager, exact)
