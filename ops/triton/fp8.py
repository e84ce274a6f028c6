# mypy: disable-error-code="untyped-decorator"
"""Numbers of 8 bits (float8_e4m3fn) in Triton: multiplied as they are, or widened in registers.

A bfloat16 number has 8 significant bits, one of 8 bits has 4. So the first is the sum of two of the
second, to its last bit: of the nearest one, and of what that leaves, which has 4 bits at most. With
a power of 2 for each 128 columns of a row, which brings its largest number near the top of the
range, only what is less than 2^-14 of that number keeps fewer bits, and errs by less than 2^-21 of
it. Products of weights with such pieces need no conversion of weights, of which a GPU can do fewer
than memory delivers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.block_scales import BLOCK, num_blocks
from torch_hybrid.ops.triton.devices import converts_fp8, interpreted
from torch_hybrid.ops.triton.products import dot

# Bits of 8, shifted to their places in float32: sign, exponent and fraction.
_KEPT: tl.constexpr = tl.constexpr(-0x78100000)
# The exponent of float32 is biased by so much more.
_REBIAS: tl.constexpr = tl.constexpr(2.0**120)
# What is left by a first piece has its last bit so much lower.
_REST: tl.constexpr = tl.constexpr(16.0)
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_BLOCKS_OF_PROGRAM = 4


def readable(weight: Tensor) -> Tensor:
    """float8_e4m3fn as kernels widen it on its device: as it is, or as its bits."""
    return weight if converts_fp8(weight.device) else weight.view(torch.uint8)


def comes_in_pieces(x: Tensor) -> bool:
    """Whether x is multiplied by weights of 8 bits in two pieces of 8 bits.

    In the interpreter alone: on an H200 (Triton 3.6) the results were wrong by a third of the
    largest, and why is not known. TODO: everywhere from compute capability 9 on, once it is.
    """
    return x.dtype == torch.bfloat16 and interpreted()


def fp8_pieces(x: Tensor) -> tuple[Tensor, Tensor]:
    """[2, M, K] float8_e4m3fn, the second in units of 1/16 of the first, and what both are times:
    [ceil(K / 128), M] float32, powers of 2, NaN where x [M, K] is not finite."""
    num_rows, depth = x.shape
    pieces = x.new_empty(2, num_rows, depth, dtype=torch.float8_e4m3fn)
    units = x.new_empty(num_blocks(depth), num_rows, dtype=torch.float32)
    _fp8_pieces_kernel[(num_rows, triton.cdiv(units.shape[0], _BLOCKS_OF_PROGRAM))](
        x, pieces, units, x.stride(0), num_rows, K=depth, BLOCKS=_BLOCKS_OF_PROGRAM, num_warps=4
    )
    return pieces, units


@triton.jit(do_not_specialize=["M"])
def _fp8_pieces_kernel(
    x: tl.tensor,
    pieces: tl.tensor,
    units: tl.tensor,
    stride_x: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program: some blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    b_x = tl.load(x + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    # As integers, of which NaN is the largest: a maximum of numbers would pass over it.
    sizes = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(sizes, 1) & 0x7F800000
    # The largest number is brought to 128 or more, and less than 256.
    bits = tl.maximum(exponent, 8 << 23) - (7 << 23)
    b_x = b_x * ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    unit = tl.where(exponent == 0x7F800000, float("nan"), bits.to(tl.float32, bitcast=True))
    # Rounded to 4 bits here: the interpreter's conversion does not carry into the exponent.
    rounded = (b_x.to(tl.int32, bitcast=True) + 0x80000) & -0x100000
    first = rounded.to(tl.float32, bitcast=True).to(tl.float8e4nv)
    rest = ((b_x - first.to(tl.float32)) * _REST).to(tl.float8e4nv)
    tl.store(pieces + row * K + k, first, mask=k < K)
    tl.store(pieces + (M + row) * K + k, rest, mask=k < K)
    tl.store(units + block * M.to(tl.int64) + row, unit, mask=block * _BLOCK < K)


@triton.jit
def fp8_dot(w: tl.tensor, x: tl.tensor, rest: tl.tensor, zeros: tl.tensor) -> tl.tensor:
    """``w @ x`` for w of 8 bits: x whole, ``rest`` being x too, or both of its pieces."""
    if x.dtype == tl.float8e4nv:
        product = tl.dot(w, x, zeros) + tl.dot(w, rest, zeros) / _REST
    else:
        product = dot(widen(w, x.dtype), x, zeros)
    return product


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
