"""Backward of the gated rule in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.backward import make_backward
from tests.ops.packed_backward import check, check_single, gradients, moved
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule

# The kernels of all inputs hold three sums [C, K]: 526 us of 1x8192 on an H200 and 716 in parts, or
# 267 in Gluon, where one that spilled more took 285. The first has 168 registers, for three
# programs on an SM.
MAY_SPILL = {"systems": 8, "gradients": 16, "inputs": 296, "hopper_inputs": 152}


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_gradients_in_interpreter(qk_l2norm: bool):
    check(make_backward(qk_l2norm=qk_l2norm), 1e-6)


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward(dtype=torch.bfloat16), 2e-2)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (256, 256)], ids=str)
def test_on_a_gpu(dims: tuple[int, int], dtype: torch.dtype, tolerance: float):
    x = make_backward(heads=(2, 4), dims=dims, dtype=dtype, device="cuda")
    check(x, tolerance)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
def test_packed_is_single_on_a_gpu():
    lengths = (70, 300, 64)
    x = make_backward(
        lengths, heads=(2, 4), dims=(128, 128), dtype=torch.bfloat16, device="cuda",
        num_padding_tokens=0,
    )  # fmt: skip
    check_single(x)


@needs_cross_compiler
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_hybrid.ops.delta_rule.training import _triton_gated, _triton_unit_rows
    from torch_hybrid.ops.delta_rule.training._triton_unit_rows import UnitRows

    def unit_rows(x: TrainedDeltaRule) -> UnitRows:
        factors = x.q.new_empty(x.q.shape[:2], dtype=torch.float32)
        return UnitRows(x.q, x.k, factors, factors)

    rows = []
    # Each of both kernels is launched for q and k: here once, below.
    monkeypatch.setattr(_triton_gated, "unit_rows", unit_rows)
    monkeypatch.setattr(UnitRows, "unnormalise", lambda unit, dq, dk: None)
    for label, lengths in {"Qwen3-Next": (8192,), "eight of them": (1024,) * 8}.items():
        x = make_backward(
            lengths, heads=(16, 32), dims=(128, 128), dtype=torch.bfloat16, num_padding_tokens=0
        )
        for target in ("sm_80", "sm_90"):  # Triton 3.7.1 fails to compile it for sm_100
            with launches_on(target) as launches:
                _triton_gated.gated_delta_rule_backward(moved(x, "meta"))
                unit, factors = _triton_unit_rows.normalise(x.q.to("meta"))
                _triton_unit_rows.unnormalise(unit, unit, factors)
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    table = Path(__file__).with_name("resources_gated_backward.txt")
    assert_all_fit(rows, table, may_spill=MAY_SPILL)
