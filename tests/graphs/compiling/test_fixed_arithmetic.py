"""Regions of which every value has the same bits in any graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.triton_interpreter import needs_triton
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.compiling.fixed_arithmetic import check_sums, fixed_arithmetic


def chain(x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    """Products before sums, and casts there and back; bits of which a compiler may spare."""
    y, z = given
    wide = (x * y + z).float() * y.float() + z.float()
    narrow = wide.to(x.dtype).float()
    return ((wide - narrow).to(x.dtype) + y * z) * x


def compiled(*, fixes_arithmetic: bool) -> Callable[..., Tensor]:
    backend = StepBackend(CompileLog(), pool_sizes=(), passes=(), fixes_arithmetic=fixes_arithmetic)
    return compile_step(chain, backend)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_rounded_where_they_are_computed(dtype: torch.dtype):
    """As one op after the other rounds them, which are in no graph."""
    x, *given = (torch.randn(40, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    inputs = x.to(dtype), tuple(each.to(dtype) for each in given)
    with torch.inference_mode():
        assert torch.equal(compiled(fixes_arithmetic=True)(*inputs), chain(*inputs))
        if dtype == torch.bfloat16:
            assert not torch.equal(compiled(fixes_arithmetic=False)(*inputs), chain(*inputs))


@needs_triton
def test_other_kernels_have_the_functions_that_they_had():
    from triton import knobs

    before = knobs.nvidia.libdevice_path
    with fixed_arithmetic():
        assert torch._inductor.config.emulate_precision_casts
        assert knobs.nvidia.libdevice_path is not None
    assert knobs.nvidia.libdevice_path == before
    assert not torch._inductor.config.emulate_precision_casts


def test_sums_in_kernels_are_refused():
    check_sums(["tmp4 = triton_helpers.max2(tmp3, 1)[:, None]", "tmp1 = tl.sum_of_nothing"])
    kernels = ["tmp4 = tl.sum(tmp3, 1)[:, None]", "tmp = triton_helpers.welford(a, b, c, 1)"]
    with pytest.raises(UnsupportedError, match=r"by tl\.sum, triton_helpers\.welford$"):
        check_sums(kernels)
