"""Gated norms and their gradients against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.contract import skip_reason
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.gated_norm import gated_norm_forward
from torch_hybrid.ops.gated_norm.reference import gated_norm

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # shares of norms
IMPLS = {
    name: skip_reason(each, "cpu") or "" for name, each in REGISTERED["gated_norm_forward"].items()
}


def make_inputs(
    dtype: torch.dtype, width: int = 96, group_size: int = 32, num_tokens: int = 70
) -> tuple[list[Tensor], dict[str, Any]]:
    """Rows of a wider projection, their gates and weights; and options."""
    torch.manual_seed(0)
    x, gate = torch.randn(num_tokens, 2 * width).to(dtype).chunk(2, -1)
    weight = 1 + 0.1 * torch.randn(width, dtype=torch.promote_types(dtype, torch.float32))
    options = {"eps": 1e-5, "group_size": group_size, "activation": "silu", "gates_first": False}
    return [each.requires_grad_() for each in (x, gate, weight)], options


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("width", "group_size"), [(96, 32), (40, 20), (128, 128)])
def test_values_and_gradients(
    dtype: torch.dtype, width: int, group_size: int, activation: str, gates_first: bool, impl: str
):
    if IMPLS[impl] or (impl == "cpp" and dtype == torch.float64):
        pytest.skip(IMPLS[impl] or "float64 is torch's")
    xs, options = make_inputs(dtype, width, group_size)
    options |= {"activation": activation, "gates_first": gates_first}
    out = gated_norm_forward(*xs, **options, impl=impl)
    dout = torch.randn(out.shape).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in xs]
    expected = gated_norm(*exact, **options)
    made = out, *torch.autograd.grad(out, xs, dout)
    for mine, theirs, like in zip(
        made, (expected, *torch.autograd.grad(expected, exact, dout.double())), (xs[0], *xs),
        strict=True,
    ):  # fmt: skip
        assert mine.dtype == like.dtype
        assert (mine.double() - theirs).norm() <= TOLERANCES[dtype] * theirs.norm()


@pytest.mark.skipif(bool(IMPLS["cpp"]), reason=IMPLS["cpp"])
def test_bits_do_not_go_by_threads_or_other_rows():
    xs, options = make_inputs(torch.bfloat16, num_tokens=5000)
    dout = torch.randn(xs[0].shape).bfloat16()
    made = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = gated_norm_forward(*xs, **options, impl="cpp")
        made.append((out, *torch.autograd.grad(out, xs, dout)))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *made))
    x, gate, weight = xs
    alone = gated_norm_forward(x[70:71], gate[70:71], weight, **options, impl="cpp")
    assert torch.equal(alone[0], made[0][0][70])


def test_forms_that_are_not_known_are_refused():
    xs, options = make_inputs(torch.float32)
    for wrong, told in (
        ({"group_size": 5}, "group_size must divide the 96 channels of x, got 5"),
        ({"activation": "relu"}, "activation must be one of .*, got 'relu'"),
    ):
        with pytest.raises(ValueError, match=told):
            gated_norm_forward(*xs, **{**options, **wrong}, impl="torch")
