"""System of a chunk, which the first launches of both delta rules invert in Triton.

README.md derives it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.products import dot, exact_dot


@triton.jit
def inverse(
    system: tl.tensor,
    scratch: tl.tensor,
    C: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """Compute ``(I + system)^-1`` of a strictly lower triangular ``system [C, C]``.

    Blocks of 16 on the diagonal go by substitution, then each time of twice the size: the inverse
    of [[A, 0], [B, D]] has -D^-1 B A^-1 below the diagonal. No powers of the system are formed:
    with keys that are alike they grow until nothing is left of the inverse.

    Blocks pass from thread to thread through ``scratch``, 16 C numbers that are this program's.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    diagonal = row // 16 == column // 16
    place = row * 16 + column % 16
    tl.store(scratch + place, system, mask=diagonal)
    tl.debug_barrier()
    _invert_blocks(scratch, C)
    solved = tl.load(scratch + place, mask=diagonal, other=0.0)
    zeros = tl.zeros([C, C], dtype=tl.float32)
    size = 16
    while size < C:
        row_block = row // size
        is_below = (row_block % 2 == 1) & (column // size == row_block - 1)
        product = exact_dot(solved, tl.where(is_below, system, 0.0), zeros, PIECES)
        solved -= exact_dot(product, solved, zeros, PIECES)
        size *= 2
    return solved


@triton.jit
def _invert_blocks(scratch: tl.tensor, C: tl.constexpr) -> None:
    """Put in the place of each strictly lower ``X [16, 16]`` in scratch ``(I + X)^-1``.

    A thread computes one column of one block, all of it in registers.
    """
    index = tl.arange(0, C)
    block = scratch + index // 16 * 256
    column = index % 16
    rows = ((column == 0).to(tl.float32),)
    for i in tl.static_range(1, 16):
        x = (column == i).to(tl.float32)
        for j in tl.static_range(i):
            x -= tl.load(block + (i * 16 + j)) * rows[j]
        rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + (i * 16 + column), rows[i])
    tl.debug_barrier()


@triton.jit
def rounded_inverse(minus: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Compute ``(I - minus)^-1`` of a strictly lower triangular ``minus [C, C]`` of float16.

    It goes by products alone, of numbers rounded to float16, in the order of :func:`inverse`. Up to
    blocks of 16 each warp has its own.
    """
    N: tl.constexpr = C // 16
    block = tl.arange(0, N)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.where(diagonal, tl.reshape(minus, [N, 16, N, 16]), 0.0).to(tl.float32)
    blocks = tl.sum(blocks, 2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    x = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, blocks, 0.0))
    blocks = blocks.to(tl.float16)
    zeros = tl.zeros([N, 16, 16], dtype=tl.float32)
    for level in tl.static_range(1, 4):
        below = tl.where(_is_below(row >> level, column >> level), blocks, 0.0)
        halves = x.to(tl.float16)
        x = dot(dot(halves, below, zeros).to(tl.float16), halves, x)
    solved = tl.reshape(tl.where(diagonal, tl.reshape(x, [N, 16, 1, 16]), 0.0), [C, C])
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    zeros = tl.zeros([C, C], dtype=tl.float32)
    for level in tl.static_range(4, 6 if C == 64 else 5):
        below = tl.where(_is_below(row >> level, column >> level), minus, 0.0)
        halves = solved.to(tl.float16)
        solved = dot(dot(halves, below, zeros).to(tl.float16), halves, solved)
    return solved


@triton.jit
def _is_below(row: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Tell whether blocks are the lower left quarter of one of twice their size."""
    return (row % 2 == 1) & (column == row - 1)
