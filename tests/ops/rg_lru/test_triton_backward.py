"""Backward in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.packed_backward import check, check_single, gradients, moved
from tests.ops.rg_lru.backward import make_backward
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("has_states", [True, False])
def test_gradients_in_interpreter(has_states: bool):
    check(make_backward(has_states=has_states), 1e-6)


@needs_interpreter
def test_packed_is_single_in_interpreter():
    check_single(make_backward((70, 1, 200), num_padding_tokens=0))


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward(dtype=torch.bfloat16), 1e-2)


@needs_interpreter
def test_no_sequences_in_interpreter():
    check(make_backward((), num_padding_tokens=3), 1e-6)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("has_states", [True, False])
def test_on_a_gpu(has_states: bool, dtype: torch.dtype, tolerance: float):
    x = make_backward(
        (300, 0, 70, 2000), head_dim=256, dtype=dtype, device="cuda", has_states=has_states
    )
    check(x, tolerance)
    check_single(make_backward((70, 300), dtype=dtype, device="cuda", num_padding_tokens=0))
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.rg_lru.training import _triton

    rows = []
    for label, dtype, has_states in (
        ("RecurrentGemma-2B", torch.bfloat16, False),
        ("RecurrentGemma-2B from states", torch.float32, True),
    ):
        x = make_backward((8192,), num_heads=10, head_dim=256, dtype=dtype,
                          has_states=has_states, num_padding_tokens=0)  # fmt: skip
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton.rg_lru_backward(moved(x, "meta"))
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_backward.txt"))
