"""Backward of the convolution in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.contract import rows_apart
from tests.ops.packed_backward import check_single, gradients, moved, widened
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.causal_conv1d.training.op import TrainedCausalConv1d
from torch_hybrid.ops.core.declare import DECLARED

LENGTHS = (70, 1, 0, 2, 1, 64, 3)  # sequences across a program's last token, and shorter than W


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    width: int = 4,
    channels: int = 19,
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    device: str = "cpu",
    has_states: bool = True,
    num_padding_tokens: int = 5,
) -> TrainedCausalConv1d:
    """Make the arguments of a backward, with NaN in rows of padding, and without states no bias."""
    T, N = sum(lengths) + num_padding_tokens, len(lengths)
    rows, dout = torch.randn(2, T, channels).to(dtype)
    rows[sum(lengths) :] = dout[sum(lengths) :] = torch.nan
    states = torch.randn(2, N, width - 1, channels).to(dtype) if has_states else (None, None)
    x = DECLARED["causal_conv1d_backward"].cls(
        rows_apart(rows),
        torch.randn(channels, width).to(dtype),
        torch.randn(channels).to(dtype) if has_states else None,
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        states[0],
        activation=activation,
        dout=dout,
        dfinal_state=states[1],
        impl="triton",
    )
    return on(x, device)


def on(x: TrainedCausalConv1d, device: str) -> TrainedCausalConv1d:
    """Move all tensors to a device; rows of x still lie apart."""
    there = moved(x, device)
    return replace(there, x=rows_apart(there.x))


def check(x: TrainedCausalConv1d) -> None:
    """Compare with the oracle in float64, number by number."""
    num_real = int(x.cu_seqlens[-1])
    rounding = torch.finfo(x.x.dtype).eps
    for got, exact in zip(gradients(x), gradients(widened(x), "torch"), strict=True):
        assert got.dtype == x.x.dtype
        assert got.shape == exact.shape
        off = (got.cpu().double() - exact).abs()
        # What is rounded once is off by half of it; sums of float32 lose some more of their own.
        assert (off <= rounding * exact.abs() + 1e-5).all(), off.max()
    assert not gradients(x)[0][num_real:].any()


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_gradients_in_interpreter(width: int, activation: str):
    check(make_backward(width=width, activation=activation))


@needs_interpreter
def test_without_states_or_bias_in_interpreter():
    check(make_backward(has_states=False))
    check(make_backward((), num_padding_tokens=3))


@needs_interpreter
def test_packed_is_single_in_interpreter():
    check_single(make_backward())


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_on_a_gpu(width: int, dtype: torch.dtype):
    x = make_backward(width=width, channels=300, dtype=dtype, device="cuda")
    check(x)
    check_single(x)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.causal_conv1d.training import _triton

    x = make_backward((2048,) * 4, channels=8192, dtype=torch.bfloat16, num_padding_tokens=0)
    rows = []
    for label, has_states in {"Qwen3-Next": False, "from states": True}.items():
        given = on(x, "meta")
        if not has_states:
            given = replace(given, initial_state=None, dfinal_state=None, bias=None)
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton.causal_conv1d_backward(given)
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_backward.txt"))
