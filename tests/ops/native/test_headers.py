"""The SIMD and small-matrix headers, against torch."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_hybrid.ops.native import compiler_missing, load_library

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
DTYPES = {"f": torch.float32, "b": torch.bfloat16}


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_library("test_kernels", Path(__file__).with_name("kernels.cpp"))


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def mapped(kernels: ctypes.CDLL, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The elementwise function of x; one element past the end must stay as it is."""
    y = torch.full((x.numel() + 1,), 7.0, dtype=dtype)
    kernels[f"map_{name}"](pointer(x), pointer(y), ctypes.c_int64(x.numel()))
    assert y[-1] == 7
    return y[:-1]


# ---- elementwise -----------------------------------------------------------------------------


def test_exp_is_accurate(kernels: ctypes.CDLL) -> None:
    x = torch.linspace(-87, 88.7, 1_000_003)
    exact = x.double().exp()
    error = (mapped(kernels, "exp", x, torch.float32).double() - exact).abs() / exact
    assert error.max() < 1.5e-7


def test_exp_at_the_edges(kernels: ctypes.CDLL) -> None:
    x = torch.tensor([0, -0.0, torch.inf, -torch.inf, torch.nan, 89, 1e30, -150, -1e30, -100])
    out = mapped(kernels, "exp", x, torch.float32)
    torch.testing.assert_close(out, x.exp(), rtol=0, atol=3e-45, equal_nan=True)


@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_activations(kernels: ctypes.CDLL, name: str) -> None:
    x = torch.cat([torch.linspace(-120, 120, 20_001), torch.tensor([torch.inf, torch.nan])])
    function = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[name]
    exact = function(x.double())
    out = mapped(kernels, name, x, torch.float32).double()
    torch.testing.assert_close(out, exact, rtol=4e-7, atol=1e-36, equal_nan=True)


def test_rounds_to_bfloat16_as_torch(kernels: ctypes.CDLL) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (200_001,), dtype=torch.int32).view(torch.float32)
    out, expected = mapped(kernels, "round", x, torch.bfloat16), x.bfloat16()
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert torch.equal(
        mapped(kernels, "widen", expected[~nan], torch.float32), expected[~nan].float()
    )


def test_dot(kernels: ctypes.CDLL) -> None:
    kernels.dot_fb.restype = ctypes.c_float
    for n in (0, 1, 15, 16, 33, 200):
        a, b = torch.randn(n), torch.randn(n).bfloat16()
        out = kernels.dot_fb(pointer(a), pointer(b), ctypes.c_int64(n))
        assert abs(out - (a.double() @ b.double()).item()) < 1e-4


def test_transposes_and_sums_sixteen(kernels: ctypes.CDLL) -> None:
    x, y, sums = torch.randn(16, 16), torch.empty(16, 16), torch.empty(16)
    kernels.sixteen(pointer(x), pointer(y), pointer(sums))
    assert torch.equal(y, x.T)
    torch.testing.assert_close(sums, x.sum(1))


# ---- matrix products -------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["ff", "fb", "bb"])
@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
def test_gemm(kernels: ctypes.CDLL, form: str, types: str) -> None:
    sizes = product((0, 1, 3, 4, 9, 15, 64, 70), (0, 1, 5, 32, 33, 80), (0, 1, 17, 128, 300))
    for M, N, K in sizes:
        for keep in (0.0, 0.25):
            check_gemm(kernels, form, types, (M, N, K), keep)


def check_gemm(
    kernels: ctypes.CDLL, form: str, types: str, sizes: tuple[int, int, int], keep: float
) -> None:
    """One product, with margins of NaN around the operands and of 7 around the result."""
    M, N, K = sizes
    a = padded((K, M) if form == "tn" else (M, K), DTYPES[types[0]])
    b = padded((N, K) if form == "nt" else (K, N), DTYPES[types[1]])
    c = torch.full((M + 1, N + 3), 7.0)
    c[:M, :N] = 0.5 if keep else torch.nan
    arguments = [(pointer(x), ctypes.c_int64(x.stride(0))) for x in (a, b, c)]
    kernels[f"gemm_{form}_{types}"](
        M, N, K, *arguments[0], *arguments[1], *arguments[2], ctypes.c_float(keep)
    )
    left = a.double().T if form == "tn" else a.double()
    right = b.double().T if form == "nt" else b.double()
    exact = left @ right + 0.5 * keep
    torch.testing.assert_close(c[:M, :N].double(), exact, rtol=1e-5, atol=1e-4)
    assert (c[M:] == 7).all()
    assert (c[:, N:] == 7).all()


def padded(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    wide = torch.full((shape[0] + 1, shape[1] + 2), torch.nan, dtype=dtype)
    wide[: shape[0], : shape[1]] = torch.randn(shape)
    return wide[: shape[0], : shape[1]]
