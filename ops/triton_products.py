# mypy: disable-error-code="untyped-decorator"
"""Matrix products of numbers in pieces, exact as float32 where a state depends on them.

A float32 number is the sum of three bfloat16 numbers to its last bit: its pieces, the largest
first. Tensor cores multiply pieces; of the products of two such sums, those below that bit are
left out. Where inputs are float32, numbers stay whole and products run outside the tensor cores,
which cut off the sums that they accumulate where float32 arithmetic rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton_devices import interpreted

NUM_PIECES = 3
_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


def piece_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the pieces of numbers are kept when inputs are of ``dtype``."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def pieces_of_outputs(dtype: torch.dtype) -> int:
    """Pieces of numbers that are as exact as outputs of ``dtype``."""
    return NUM_PIECES if dtype == torch.float16 else 1


def pieces_of_states(dtype: torch.dtype) -> int:
    """Pieces of numbers that are as exact as float32 when inputs are of ``dtype``."""
    return 1 if dtype == torch.float32 else NUM_PIECES


def in_pieces(x: Tensor) -> Tensor:
    """[P, *x.shape] whose sum over P is x: three where x is float16, else x itself."""
    if x.dtype != torch.float16:
        return x[None]
    rest, pieces = x.float(), []
    for _ in range(NUM_PIECES):
        pieces.append(rest.bfloat16())
        rest = rest - pieces[-1].float()
    return torch.stack(pieces)


@triton.jit
def dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """``acc + x @ y`` for pieces on both sides."""
    if _INTERPRETED:
        # The interpreter holds bfloat16 as integers and would multiply them as such.
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def piece_dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """``acc + x @ y`` for a piece x and the first PIECES pieces of y, which is float32.

    What is small is summed apart, and added at the end.
    """
    zeros = tl.zeros(acc.shape, dtype=tl.float32)
    if x.dtype == tl.float32 or _INTERPRETED:
        acc += tl.dot(x.to(tl.float32), y, zeros, input_precision="ieee")
    else:
        high = y.to(tl.bfloat16)
        if PIECES > 1:
            rest = y - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            corrections = zeros
            if PIECES > 2:
                low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                corrections = tl.dot(x, low, corrections)
            acc += tl.dot(x, middle, corrections)
        acc += tl.dot(x, high, zeros)
    return acc


@triton.jit
def exact_dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """``acc + x @ y`` for both of float32, in PIECES pieces: whole in 1, to its last bit in 3."""
    if PIECES == 1 or _INTERPRETED:
        acc += tl.dot(x, y, input_precision="ieee")
    else:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = piece_dot(low, y, acc, 1)
        acc = piece_dot(middle, y, acc, 2)
        acc = piece_dot(high, y, acc, 3)
    return acc


@triton.jit
def store_pieces(
    pointer: tl.tensor, x: tl.tensor, stride: tl.tensor, P: tl.constexpr, mask: tl.tensor
) -> None:
    """Write the first P pieces of x, which is float32, ``stride`` apart, where the mask is True."""
    for piece in tl.static_range(P):
        high = x.to(pointer.dtype.element_ty)
        tl.store(pointer + piece * stride, high, mask=mask)
        x -= high.to(tl.float32)
