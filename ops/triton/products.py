"""GEMMs of numbers in pieces, as exact as float32 where a state depends on them.

A float32 number is exactly the sum of three BF16 numbers: its pieces, the largest first. Tensor
cores multiply pieces, without the products below float32's last bit. float32 inputs stay whole, and
their products run outside the tensor cores: those truncate the sums that they accumulate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.devices import interpreted

NUM_PIECES = 3
ROUNDED: tl.constexpr = tl.constexpr(0)  # pieces of numbers that one of float16 stands for
_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


def pieces_of_states(dtype: torch.dtype) -> int:
    """Return how many pieces make numbers as exact as float32 when inputs have ``dtype``."""
    return 1 if dtype == torch.float32 else NUM_PIECES


def state_pieces(
    dtype: torch.dtype, qk_l2norm: bool, *, is_exact: bool = True
) -> tuple[int, torch.dtype]:
    """Return how many pieces delta rules keep of numbers that reach a state, and their dtype.

    float16 has the bits but not the range: it serves where rows of keys have unit length.

    Args:
        dtype: of the inputs.
        qk_l2norm: whether rows of keys have unit length.
        is_exact: as exact as float32; otherwise numbers that float16 has the range of are ROUNDED.
    """
    if dtype == torch.float32:
        return 1, torch.float32
    if not qk_l2norm:
        return 3, torch.bfloat16
    return 2 if is_exact else ROUNDED.value, torch.float16


def in_pieces(x: Tensor) -> Tensor:
    """Cut x [T, ...] into pieces [T, P, ...] whose sum is x: three of FP16, else x itself."""
    if x.dtype != torch.float16:
        return x[:, None]
    rest, pieces = x.float(), []
    for _ in range(NUM_PIECES):
        pieces.append(rest.bfloat16())
        rest = rest - pieces[-1].float()
    return torch.stack(pieces, 1)


@triton.jit
def dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """Compute ``acc + x @ y`` of two pieces."""
    if _INTERPRETED:
        # The interpreter holds bfloat16 as integers and would multiply them as such.
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def first_piece(x: tl.tensor) -> tl.tensor:
    """Truncate float32 numbers to BF16.

    Their bits are shifted: conversions of single numbers are slower than the products.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def without_first_piece(x: tl.tensor) -> tl.tensor:
    """Subtract :func:`first_piece` from float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def piece_dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """Compute ``acc + x @ y`` of float32 x, cut into PIECES pieces, and one piece y.

    Small products are added first. x stays in registers, as a product's left side may.
    """
    if y.dtype == tl.float32 or _INTERPRETED:
        # Outside the tensor cores the other way around is faster.
        acc += tl.trans(tl.dot(tl.trans(y.to(tl.float32)), tl.trans(x), input_precision="ieee"))
    elif PIECES == 1:
        acc = tl.dot(x.to(tl.bfloat16), y, acc)
    else:
        rest = without_first_piece(x)
        middle = first_piece(rest)
        if PIECES > 2:
            acc = tl.dot(first_piece(without_first_piece(rest)), y, acc)
        acc = tl.dot(middle, y, acc)
        # Cut off late, from numbers that are there anyway: it saves registers.
        acc = tl.dot(first_piece(x), y, acc)
    return acc


@triton.jit
def exact_dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """Compute ``acc + x @ y`` of float32 matrices in PIECES pieces: 1 is whole, 3 is exact."""
    if PIECES == 1 or _INTERPRETED:
        acc += tl.dot(x, y, input_precision="ieee")
    elif PIECES == 2:
        acc = pieces_dot(cut(x, 2), cut(y, 2), acc)
    else:
        rest = without_first_piece(y)
        acc = piece_dot(x, first_piece(without_first_piece(rest)), acc, 1)
        acc = piece_dot(x, first_piece(rest), acc, 2)
        acc = piece_dot(x, first_piece(y), acc, 3)
    return acc


@triton.jit
def inverse_root(x: tl.tensor) -> tl.tensor:
    """Compute ``x^-1/2`` to float32 precision: the GPU's estimate and a step of Newton's method."""
    root = tl.rsqrt(x)
    return root + root * (0.5 - 0.5 * x * root * root)


@triton.jit
def sum_rows(select: tl.tensor, x: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """Sum the rows of float32 x [R, N] that each ``select[i]`` [R] marks."""
    if PIECES == 1 or _INTERPRETED:
        acc = tl.dot(select.to(tl.float32), x, input_precision="ieee")
    else:
        chosen = tl.where(select, 1.0, 0.0).to(tl.bfloat16)
        rest = without_first_piece(x)
        acc = tl.dot(chosen, first_piece(without_first_piece(rest)))
        acc = tl.dot(chosen, first_piece(rest), acc)
        acc = tl.dot(chosen, first_piece(x), acc)
    return acc


@triton.jit
def transpose_dot(x: tl.tensor, acc: tl.tensor, factor: tl.constexpr = 1.0) -> tl.tensor:
    """Compute ``acc + factor x^T`` by a GEMM, for which x may stay in shared memory as it came.

    ``factor`` is a power of 2.
    """
    if x.dtype == tl.float32 or _INTERPRETED:
        acc += tl.trans(x).to(tl.float32) * factor
    else:
        index = tl.arange(0, x.shape[1])
        diagonal = tl.where(index[:, None] == index[None, :], factor, 0.0).to(x.dtype)
        acc = tl.dot(diagonal, tl.trans(x), acc)
    return acc


@triton.jit
def store_pieces(
    pointer: tl.tensor, x: tl.tensor, stride: tl.tensor, P: tl.constexpr, mask: tl.tensor
) -> None:
    """Write the first P pieces of x, which is float32, ``stride`` apart, where the mask is True."""
    if P == 1:
        tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)
    else:
        pieces = cut(x, P)
        for i in tl.static_range(P):
            tl.store(pointer + i * stride, pieces[i], mask=mask)


@triton.jit
def cut(x: tl.tensor, PIECES: tl.constexpr) -> tl.tuple:
    """Cut float32 numbers into PIECES pieces: 1 is whole, 2 are FP16, 3 are BF16."""
    if PIECES == 1:
        pieces = (x,)
    elif PIECES == 2:
        first = x.to(tl.float16)
        pieces = (first, (x - first.to(tl.float32)).to(tl.float16))  # type: ignore[assignment]
    else:
        rest = without_first_piece(x)
        pieces = (first_piece(x), first_piece(rest), first_piece(without_first_piece(rest)))  # type: ignore[assignment]
    return pieces


@triton.jit
def cut_rows(x: tl.tensor, PIECES: tl.constexpr) -> tl.tuple:
    """Cut x [R, N] into pieces; return them and the factors [R], powers of 2, of their products.

    FP16 has a narrow range: each row is scaled first, its largest number to about 2^10.
    """
    unit = tl.full([x.shape[0]], 1.0, dtype=tl.float32)
    if PIECES == 2:
        exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.maximum(exponent, 11 << 23) - (10 << 23)
        unit = bits.to(tl.float32, bitcast=True)
        x = x * ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    return cut(x, PIECES), unit


@triton.jit
def pieces_dot(x: tl.tuple, y: tl.tuple, acc: tl.tensor) -> tl.tensor:
    """Compute ``acc + x @ y`` of numbers in pieces; small products are added first."""
    if x[0].dtype == tl.float32:
        # Outside the tensor cores the other way around is faster.
        return acc + tl.trans(tl.dot(tl.trans(y[0]), tl.trans(x[0]), input_precision="ieee"))
    MOST: tl.constexpr = max(len(x), len(y))
    for order in tl.static_range(MOST - 1, -1, -1):
        for i in tl.static_range(len(x)):
            if i <= order and order - i < len(y):
                acc = dot(x[i], y[order - i], acc)
    return acc


@triton.jit
def rows_dot(x: tl.tensor, y: tl.tuple, zeros: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """Compute ``x @ y`` of float32 x [R, N], which is cut into PIECES, and y in pieces."""
    if PIECES == ROUNDED:
        product = dot(x.to(tl.float16), y[0], zeros)
    else:
        pieces, unit = cut_rows(x, PIECES)
        product = pieces_dot(pieces, y, zeros) * unit[:, None]
    return product


@triton.jit
def load_pieces(
    pointer: tl.tensor, stride: tl.tensor, PIECES: tl.constexpr, mask: tl.tensor
) -> tl.tuple:
    """Load PIECES pieces that lie ``stride`` apart; 0 where the mask is False."""
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces = pieces + (tl.load(pointer + i * stride, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def transposed(pieces: tl.tuple) -> tl.tuple:
    """Transpose each piece."""
    columns = ()
    for i in tl.static_range(len(pieces)):
        columns = columns + (tl.trans(pieces[i]),)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@triton.jit
def rounded_dot(x: tl.tensor, y: tl.tensor, acc: tl.tensor, PIECES: tl.constexpr = 1) -> tl.tensor:
    """Compute ``acc + x @ y`` of float32 x rounded to y's dtype: for outputs, never for states.

    With PIECES of ROUNDED, the caller has brought x into FP16's range.
    """
    if y.dtype == tl.float16 and PIECES != ROUNDED:
        pieces, unit = cut_rows(x, 2)
        acc += dot(pieces[0], y, tl.zeros_like(acc)) * unit[:, None]
    elif y.dtype == tl.float32:
        acc = pieces_dot((x,), (y,), acc)
    else:
        acc = dot(x.to(y.dtype), y, acc)
    return acc
