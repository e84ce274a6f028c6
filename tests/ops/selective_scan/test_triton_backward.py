"""Backward in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.packed_backward import check, check_single, gradients, moved
from tests.ops.selective_scan.backward import make_backward
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.selective_scan import _triton as forward


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_SEGMENT", 32)  # 16 of so few channels


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("is_whole", [True, False])
def test_gradients_in_interpreter(short_segments: None, is_whole: bool):
    check(make_backward(is_whole=is_whole), 1e-6)


@needs_interpreter
def test_packed_is_single_in_interpreter(short_segments: None):
    check_single(make_backward((33, 2, 16), num_padding_tokens=0))


@needs_interpreter
def test_bfloat16_in_interpreter(short_segments: None):
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward((20, 3), dtype=torch.bfloat16), 2e-2)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("sizes", [(1, 4096, 16), (2, 38, 12), (1, 70, 40)], ids=str)
def test_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype, tolerance: float):
    x = make_backward((300, 0, 70), sizes=sizes, dtype=dtype, device="cuda")
    check(x, tolerance)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
def test_packed_is_single_on_a_gpu():
    check_single(
        make_backward((70, 300, 64), dtype=torch.bfloat16, device="cuda", num_padding_tokens=0)
    )


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.selective_scan.training import _triton

    rows = []
    for label, sizes in (("Falcon-Mamba", (1, 8192, 16)), ("Mamba 130M", (1, 1536, 16))):
        x = make_backward((8192,), sizes=sizes, dtype=torch.bfloat16, num_padding_tokens=0)
        for target in ("sm_80", "sm_90"):
            with launches_on(target) as launches:
                _triton.selective_scan_backward(moved(x, "meta"))
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_backward.txt"))
