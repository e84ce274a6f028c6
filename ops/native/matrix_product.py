"""Products of matrices on a CPU: by torch, or otherwise where that was measured faster.

A linear layer's output and its gradients are three such products, whose factors lie by rows or by
columns. On some CPUs torch's library multiplies float32 with half of each register: C++ does it.
On those without instructions for BF16 it multiplies BF16 at a fraction of float32's rate: there
BF16 is widened, and the float32 product rounded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import is_bf16_slow, tuning

_RUN = kernel(
    "matrix_product",
    Path(__file__).with_name("matrix_product.cpp"),
    tensors="a b y",
    integers="M N K lda ldb ldy a_by_columns b_by_columns adds num_threads",
)
_GAIN = 1.25  # of rates as measured, where nothing is transposed: that costs up to a fifth
_FEWEST = 32  # rows, columns and depth of a product that is not torch's


def is_faster(dtype: torch.dtype) -> bool:
    """Tell whether ``multiply`` is faster than torch's product, as this CPU measured."""
    if dtype == torch.bfloat16:
        return is_bf16_slow()
    measured = tuning(torch.float32)
    return dtype == torch.float32 and measured.ours_rate > _GAIN * measured.torch_rate


def multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
    """Write the product of two matrices of one dtype to ``out``, or add it, and return ``out``.

    Args:
        a: [M, K] on any device, of any strides.
        b: [K, N] likewise.
        out: [M, N]; mutated.
    """
    sizes = (*out.shape, a.shape[1])
    if (
        a.device.type != "cpu"
        or min(sizes) < _FEWEST
        or 1 not in a.stride()
        or 1 not in b.stride()
        or out.stride(1) != 1
        or not is_faster(a.dtype)
    ):
        return out.addmm_(a, b) if adds else torch.mm(a, b, out=out)
    if a.dtype == torch.bfloat16:
        wide = out.float() if adds else out.new_empty(out.shape, dtype=torch.float32)
        return out.copy_(multiply(a.float(), b.float(), wide, adds=adds))
    by_columns = int(a.stride(1) != 1), int(b.stride(1) != 1)
    strides = a.stride(by_columns[0]), b.stride(by_columns[1]), out.stride(0)
    _RUN(a, b, out, *sizes, *strides, *by_columns, adds, torch.get_num_threads())
    return out
