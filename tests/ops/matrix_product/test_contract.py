"""Products of matrices that lie by rows and by columns, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.contract import skip_reason
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.matrix_product import matrix_product_forward
from torch_hybrid.ops.native import matrix_product as native

IMPLS = {
    name: skip_reason(each, "cpu") or ""
    for name, each in REGISTERED["matrix_product_forward"].items()
}
FASTER = frozenset({torch.float32, torch.bfloat16})
# Share of the norm, of float32 with two thousand summands.
TOLERANCES = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 4e-3}
# Whole tiles, ragged ones, further stretches of depth, further rows, and what is left to torch.
SHAPES = [(64, 96, 512), (33, 50, 65), (100, 400, 2100), (2100, 129, 77), (40, 35, 4097), (5, 7, 3)]


@pytest.fixture(params=[impl for impl in IMPLS if not IMPLS[impl]])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name an implementation, whose kernel runs whatever this CPU measured."""
    monkeypatch.setattr(native, "is_faster", FASTER.__contains__)
    return str(request.param)


def make_matrix(rows: int, columns: int, dtype: torch.dtype, *, by_columns: bool) -> Tensor:
    """Draw a part of a larger matrix."""
    if by_columns:
        return make_matrix(columns, rows, dtype, by_columns=False).T
    return torch.randn(rows, columns + 3, dtype=torch.float64).to(dtype)[:, :columns]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_values_and_gradients(
    M: int, N: int, K: int, a_by_columns: bool, b_by_columns: bool, dtype: torch.dtype, impl: str
):
    if impl == "cpp" and dtype not in FASTER:
        pytest.skip("other dtypes are torch's")
    torch.manual_seed(0)
    a = make_matrix(M, K, dtype, by_columns=a_by_columns).requires_grad_()
    b = make_matrix(K, N, dtype, by_columns=b_by_columns).requires_grad_()
    out, dout = matrix_product_forward(a, b, impl=impl), torch.randn(M, N).to(dtype)
    made = out, *torch.autograd.grad(out, (a, b), dout)
    exact = [x.detach().double() for x in (a, b, dout)]
    wanted = exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2]
    for mine, theirs in zip(made, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= TOLERANCES[dtype] * theirs.norm()


def test_a_frozen_factor_has_no_gradient(impl: str):
    a, b = torch.randn(40, 33, requires_grad=True), torch.randn(33, 50)
    matrix_product_forward(a, b, impl=impl).sum().backward()
    torch.testing.assert_close(a.grad, b.sum(1).expand(40, 33))
    assert b.grad is None


@pytest.mark.skipif(bool(IMPLS["cpp"]), reason=IMPLS["cpp"])
def test_bits_go_by_rows_and_columns_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "is_faster", FASTER.__contains__)
    a, b = torch.randn(700, 2500), torch.randn(2500, 900)
    whole = matrix_product_forward(a, b, impl="cpp")
    before = torch.get_num_threads()
    torch.set_num_threads(1 + before % 2)
    assert torch.equal(matrix_product_forward(a, b, impl="cpp"), whole)
    torch.set_num_threads(before)
    by_columns = a.T.contiguous().T, b.T.contiguous().T
    assert torch.equal(matrix_product_forward(*by_columns, impl="cpp"), whole)
    part = matrix_product_forward(a[70:140], b[:, 33:99], impl="cpp")
    assert torch.equal(part, whole[70:140, 33:99])


@pytest.mark.skipif(bool(IMPLS["cpp"]), reason=IMPLS["cpp"])
@pytest.mark.parametrize("dtype", FASTER)
def test_a_product_is_added(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "is_faster", FASTER.__contains__)
    shapes = (40, 2100), (2100, 50), (40, 50)
    a, b, sums = (torch.randn(shape).to(dtype) for shape in shapes)
    wanted = sums.double() + a.double() @ b.double()
    made = native.multiply(a, b, sums, adds=True)
    assert made is sums
    assert (made.double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()
