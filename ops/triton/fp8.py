# mypy: disable-error-code="untyped-decorator"
"""Numbers of 8 bits (float8_e4m3fn) in Triton, widened in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.devices import converts_fp8

# Bits of 8, shifted to their places in float32: sign, exponent and fraction.
_KEPT: tl.constexpr = tl.constexpr(-0x78100000)
# The exponent of float32 is biased by so much more.
_REBIAS: tl.constexpr = tl.constexpr(2.0**120)


def readable(weight: Tensor) -> Tensor:
    """float8_e4m3fn as kernels widen it on its device: as it is, or as its bits."""
    return weight if converts_fp8(weight.device) else weight.view(torch.uint8)


@triton.jit
def widen(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float8_e4m3fn, or its bits, to a wider float that holds each of them exactly."""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.int32) << 24
        wide = ((bits >> 4) & _KEPT).to(tl.float32, bitcast=True) * _REBIAS
        wide = tl.where((bits & 0x7F000000) == 0x7F000000, float("nan"), wide)
    else:
        wide = numbers
    return wide.to(dtype)
