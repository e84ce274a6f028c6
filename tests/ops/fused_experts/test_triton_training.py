"""Experts to train with in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.fused_experts.cases import CASES, Case
from tests.ops.fused_experts.training import made_by_both, make_backward
from tests.ops.packed_backward import moved, widened
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.fused_experts.training.op import FusedExpertsBackward

INTERPRETED = ["odd_sizes", "some_choices_empty", "all_choices_empty", "no_tokens"]
INTERPRETED += ["limit_odd_sizes", "softcaps_odd_sizes", "no_gate_odd_sizes"]
# Tokens enough that experts have many rows, some no expert, and one expert no rows.
ON_A_GPU = {
    "plain": Case(num_tokens=500, num_experts=9, top_k=3, dim=192, width=320, routing="some_none"),
    "one": Case(num_tokens=300, num_experts=9, dim=192, width=64, routing="one"),
}
ON_A_GPU["no gate"] = replace(ON_A_GPU["plain"], activation="relu2")
ON_A_GPU["limit"] = replace(ON_A_GPU["plain"], limit=0.5)
ON_A_GPU["softcaps"] = replace(ON_A_GPU["plain"], softcaps=(0.5, 1.5))


def check(x: FusedExpertsBackward, tolerance: float) -> None:
    """Compare with "torch" in float64, by the norms of outputs and gradients.

    Where rounding moves activations over a limit, their gradients are others for "torch" as well.
    """
    made, exact = made_by_both(x, "triton"), made_by_both(widened(x), "torch")
    rounded = made_by_both(x, "torch") if x.limit is not None else exact
    for got, by_torch, want in zip(made, rounded, exact, strict=True):
        assert got.shape == want.shape
        bound = tolerance * want.norm() + 2 * (by_torch.cpu().double() - want).norm()
        assert (got.cpu().double() - want).norm() <= bound


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("name", INTERPRETED)
def test_gradients_in_interpreter(name: str):
    check(make_backward(CASES[name]), 1e-6)


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward(CASES["some_choices_empty"], dtype=torch.bfloat16), 2e-2)


@needs_cuda
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name: str):
    x = moved(make_backward(ON_A_GPU[name], dtype=torch.bfloat16), "cuda")
    check(x, 8e-3)
    check(moved(make_backward(ON_A_GPU[name]), "cuda"), 1e-5)
    assert all(map(torch.equal, made_by_both(x, "triton"), made_by_both(x, "triton")))


@needs_cuda
def test_a_cuda_graph_serves_any_routing():
    """Nothing is read on the host."""
    x = moved(make_backward(ON_A_GPU["plain"], dtype=torch.bfloat16), "cuda")
    made_by_both(x, "triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made_by_both(x, "triton")
    x.expert_ids.copy_(x.expert_ids.flip(0))
    graph.replay()
    assert all(map(torch.equal, captured, made_by_both(x, "triton")))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.fused_experts.training import _triton

    rows = []
    shapes = {
        "Qwen3-Next": Case(num_tokens=8192, num_experts=512, top_k=10, dim=2048, width=512),
        "Nemotron-H": Case(
            num_tokens=8192, num_experts=128, top_k=6, dim=2688, width=1856, activation="relu2"
        ),
    }
    shapes["Inkling-2"] = replace(shapes["Qwen3-Next"], softcaps=(8.0, 8.0))
    for label, case in shapes.items():
        small = make_backward(replace(case, num_tokens=4, num_experts=16), dtype=torch.bfloat16)
        for target in SHARED_LIMITS:
            one = replace(moved(small, "meta"), needs_gate_up=False)  # nothing is launched twice
            with launches_on(target) as launches:
                _triton.fused_experts_forward(one)
            with launches_on(target) as others:
                _triton.fused_experts_backward(one)
            rows += [resources_of(x, target, label) for x in (launches | others).values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_training.txt"))
