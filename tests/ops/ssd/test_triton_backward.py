"""Backward in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.packed_backward import check, check_single, gradients, moved
from tests.ops.ssd.backward import make_backward
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of

# Measured on an H200 to be faster than what spills nothing: 64 rows a chunk, four warps for values,
# walks of whole heads of 80.
# Falcon-H1's and xLSTM's were timed in this form alone.
MAY_SPILL = {
    "states: Nemotron-H": 8,
    "values: Nemotron-H": 32,
    "keys: Falcon-H1": 64,
    "keys: xLSTM": 64,
    "values: xLSTM": 232,
}


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("form", ["Mamba2", "lightning", "mLSTM"])
def test_gradients_in_interpreter(form: str):
    x = make_backward(is_mamba2=form != "lightning")
    if form == "mLSTM":
        x.D = None
    check(x, 1e-6)


@needs_interpreter
def test_packed_is_single_in_interpreter():
    check_single(make_backward((33, 2), num_padding_tokens=0))


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward(dtype=torch.bfloat16), 2e-2)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("dims", [(128, 64), (24, 12), (256, 64)], ids=str)
def test_on_a_gpu(dims: tuple[int, int], dtype: torch.dtype, tolerance: float):
    x = make_backward((300, 0, 70), dims=dims, dtype=dtype, device="cuda")
    check(x, tolerance)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
def test_packed_is_single_on_a_gpu():
    check_single(
        make_backward((70, 300, 64), dtype=torch.bfloat16, device="cuda", num_padding_tokens=0)
    )


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.ssd.training import _triton

    rows = []
    for label, heads, dims in (
        ("Nemotron-H", (8, 96), (128, 80)),
        ("Falcon-H1", (1, 24), (256, 64)),
        ("xLSTM", (8, 8), (256, 528)),
    ):
        x = make_backward(
            (8192,), heads=heads, dims=dims, dtype=torch.bfloat16, num_padding_tokens=0
        )
        for target in ("sm_80", "sm_90"):
            with launches_on(target) as launches:
                _triton.ssd_backward(moved(x, "meta"))
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    table = Path(__file__).with_name("resources_backward.txt")
    assert_all_fit(rows, table, may_spill=MAY_SPILL)
